/*
 * The map file: what the node's agent tells the steps of one incarnation.
 * Written by the job's owner, so nothing in it is believed unchecked.
 */
#ifndef GEMINI_MAP_H
#define GEMINI_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
	MAP_SIZE_MAX = 1 << 20,
	MAP_NODES_MAX = 65536,
};

#define MAP_SPARE UINT32_MAX

struct map {
	uint32_t job;
	uint32_t restart;
	uint32_t nodes;
	uint32_t node_rank;		/* this node's; MAP_SPARE: it does not train */
	uint32_t *node_ranks;		/* by position in nodelist; a permutation */
	uint64_t epoch;
	uint16_t master_port;
	uint16_t agent_port;
	const char *nodelist;
	const char *master_addr;
	const char *socket;
	const char *hash;
	char *text;			/* holds the strings above */
};

/*
 * Parses `size` bytes (a copy is taken). False, and nothing to free, on any
 * flaw: a wrong first line, a missing or repeated key, a value out of range.
 * Unknown keys are skipped, so that a newer agent may say more.
 */
bool map_parse(const char *bytes, size_t size, struct map *map);

/*
 * Reads and parses the file, if it is a regular one that belongs to `owner`;
 * never follows a link and never waits.
 */
bool map_read(const char *path, uid_t owner, struct map *map);

void map_free(struct map *map);

#endif
