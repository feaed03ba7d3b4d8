"""Parts shared by every frontend (torch, MPI): agent connection, shared memory and seal; no torch here."""
