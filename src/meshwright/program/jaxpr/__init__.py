"""Reading jaxprs: equations across JAX releases, module names in scopes, custom derivatives."""
