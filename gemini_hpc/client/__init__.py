"""What every front (torch, MPI) needs of an agent: the connection, the shared memory, the seal. No torch here."""
