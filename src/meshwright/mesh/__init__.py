"""Meshes: axes and their sizes, building meshes from devices, and drawing them."""
