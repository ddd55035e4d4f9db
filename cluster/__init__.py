"""Everything that touches the outside: Ray, HTTP, gRPC, files, the command line."""
