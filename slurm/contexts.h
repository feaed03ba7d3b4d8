/* The plugin's work in each of Slurm's contexts, with one file for each. */
#ifndef GEMINI_CONTEXTS_H
#define GEMINI_CONTEXTS_H

#include <slurm/spank.h>

#include "config.h"

/* Exit status, documented: the job asks for more copies than it has nodes. */
enum { EXIT_UNPROTECTABLE = 78 };

/* sbatch, salloc */
int allocator_init_post_opt(spank_t sp);

/* srun, inside an allocation or making its own */
int local_init_post_opt(spank_t sp);

/* slurmstepd, as root, before it makes a step's tasks */
int remote_init_post_opt(spank_t sp, const struct config *config);

/* slurmstepd, as the user, in the process that becomes the task */
int remote_task_init(spank_t sp, const struct config *config);

#endif
