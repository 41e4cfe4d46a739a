"""A traced loss divided into pipeline stages."""
