/* The job's directory, made again after somebody has unmounted it under the running job. */
#ifndef GEMINI_AGAIN_H
#define GEMINI_AGAIN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/*
 * Makes a job's directory again, as root, before a step begins. If this node's agent of the job is known and
 * the directory is gone, `program` (root's Python) makes it; the agent moves in by itself. Returns whether the
 * directory was made. Sends no request to a file system that a user may have mounted, and takes a bounded
 * time.
 */
bool again_make(const char *program, const char *run_dir, uint32_t job, uid_t owner);

#endif
