"""Other libraries' names and signatures on tpfused's layers: change a program's imports, and nothing else in it."""
