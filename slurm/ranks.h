/* RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a step's tasks. */
#ifndef GEMINI_RANKS_H
#define GEMINI_RANKS_H

#include <stdint.h>

#include <slurm/spank.h>

#include "map.h"

struct step {
	uint32_t job, restart, number;
};

/*
 * Exports all of them, or none. With a map, the values are those on which the agents have agreed. Without a
 * map (NULL), they follow Slurm's order, with the step's first host as master, as agents without a past would
 * agree. Exports none if the user has set one of them, in steps that are not on all nodes of the job, and in
 * scripts.
 */
void ranks_export(spank_t sp, const struct step *step, const struct map *map);

#endif
