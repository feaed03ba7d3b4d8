/* The reason that root's prolog has left on this node for a job that it could not protect. */
#ifndef GEMINI_UNPROTECTED_H
#define GEMINI_UNPROTECTED_H

#include <stdbool.h>
#include <stdint.h>

enum { UNPROTECTED_SIZE = 256 };

/*
 * Reads the reason as one line of printable ASCII, and whether it lies on other nodes. Returns false if none
 * was left for this job and incarnation. The file belongs to root and lies in a directory of root's; its text
 * may come from an agent.
 */
bool unprotected_why(const char *run_dir, uint32_t job, uint32_t restart, char why[UNPROTECTED_SIZE], bool *elsewhere);

#endif
