/* Ranks by (node rank, local id), for any number of tasks per node. */
#ifndef GEMINI_LAYOUT_H
#define GEMINI_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Reads Slurm's form, e.g. "2(x3),1", into tasks[nodes]; false unless it
 * describes exactly `nodes` nodes.
 */
bool layout_parse(const char *text, uint32_t nodes, uint32_t *tasks);

/* The tasks of all nodes whose node rank is below `node_rank`. */
uint64_t layout_first_rank(const uint32_t *tasks, const uint32_t *node_ranks, uint32_t nodes,
			   uint32_t node_rank);

#endif
