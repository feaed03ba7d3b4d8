/* A step's layout as Slurm writes it: its first host, its tasks per node, and the ranks that follow from these. */
#ifndef GEMINI_LAYOUT_H
#define GEMINI_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Reads Slurm's form, e.g. "2(x3),1", into tasks[nodes]. Returns false unless it describes exactly `nodes` nodes. */
bool layout_parse(const char *text, uint32_t nodes, uint32_t *tasks);

/* Returns the number of tasks on all nodes whose node rank is below `node_rank`. */
uint64_t layout_first_rank(const uint32_t *tasks, const uint32_t *node_ranks, uint32_t nodes,
			   uint32_t node_rank);

/*
 * Reads the first host of a host list, e.g. "gpu[001-004,9]x[2-3],login" into "gpu001x2". Returns false for
 * text that is no host list.
 */
bool layout_first_host(const char *list, char *host, size_t size);

#endif
