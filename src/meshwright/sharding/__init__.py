"""The placement of every array on the mesh, with reasons: rules, annotations, fsdp and tensor."""
