"""Meshes: axes and their sizes, building meshes over devices, and drawing them."""
