/*
 * The map file, in which the node's agent describes an incarnation to its steps. The job's owner writes it, so
 * every value in it is checked.
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
	uint32_t node_rank;		/* this node's; MAP_SPARE: the node does not train */
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
 * Parses a copy of `size` bytes. Returns false, with nothing to free, on any flaw: a wrong first line, a
 * missing or repeated key, a value out of range. Ignores unknown keys, so that a newer agent may add some.
 */
bool map_parse(const char *bytes, size_t size, struct map *map);

/*
 * Reads and parses the file, if it is a regular file that belongs to `owner`. Never follows a link and never
 * waits.
 */
bool map_read(const char *path, uid_t owner, struct map *map);

void map_free(struct map *map);

#endif
