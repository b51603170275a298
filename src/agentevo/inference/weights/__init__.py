"""How trained weights reach the engines: in files, object stores, or over a process group."""
