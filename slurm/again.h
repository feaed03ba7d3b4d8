/* The job's directory once more, where somebody has unmounted it under the running job. */
#ifndef GEMINI_AGAIN_H
#define GEMINI_AGAIN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/*
 * By root, before a step begins. Where this node's agent of the job is known
 * and the job's directory is gone, has `program` (a Python, root's) make it
 * again; the agent moves in by itself. Whether it did. Nothing is asked of what
 * a user may have mounted, and it takes a bounded time.
 */
bool again_make(const char *program, const char *run_dir, uint32_t job, uid_t owner);

#endif
