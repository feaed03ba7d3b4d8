/* The plugin's entry points, as Slurm calls them. */
#ifndef CALLBACKS_H
#define CALLBACKS_H

#include <slurm/spank.h>

int slurm_spank_init(spank_t sp, int argc, char **argv);
int slurm_spank_init_post_opt(spank_t sp, int argc, char **argv);
int slurm_spank_task_init(spank_t sp, int argc, char **argv);

#endif
