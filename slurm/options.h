/* The options that users give to sbatch, salloc and srun. */
#ifndef GEMINI_OPTIONS_H
#define GEMINI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <slurm/spank.h>

enum {
	REPLICAS_MAX = 32,		/* copies of every shard, the own node's included; nodes of a parity group */
	GROUP_USUAL = 4,
	PARITY_MAX = 4,			/* nodes of a group that may be lost */
	REDUNDANCY_SIZE = 8,		/* "xor", "rs:28+4" */
	TIER_MAX = 4096,		/* bytes of a path */
	TIER_INTERVAL_MAX_S = 604800,	/* a week */
	HANG_MAX_S = 604800,
	HANG_USUAL_S = 60,	/* less is noted: reads of files and evaluations on one rank take as long */
	INTERVAL_SIZE = 8,		/* "auto", or digits */
	HANG_SIZE = 8,			/* "off", or digits */
	SPARES_MAX = 1024,
};

#define AFTER_MAX UINT32_MAX	/* a job id */

/* The requested values; 0 and "" mean: not given. All values are valid. */
struct options {
	uint32_t replicas;	/* with parity: the nodes of a group */
	uint32_t group;		/* 0: whole copies */
	char redundancy[REDUNDANCY_SIZE];	/* with parity: "xor", or "rs:K+M" */
	uint32_t spares;
	uint32_t after;
	char tier[TIER_MAX + 1];
	char tier_interval[INTERVAL_SIZE];
	char hang[HANG_SIZE];
};

/* Registers the options; must run in slurm_spank_init of every context. */
int options_register(spank_t sp);

/* Returns whether `name`, without its dashes, is one of the options. Each option takes a value. */
bool options_has(const char *name, size_t len);

/* Returns the options given so far. */
const struct options *options_get(void);

/* Each function checks one value as the user wrote it. */
bool options_parse_replicas(const char *text, uint32_t *replicas);
bool options_parse_redundancy(const char *text, uint32_t *group, char value[REDUNDANCY_SIZE]);
bool options_parse_tier(const char *text);
bool options_parse_tier_interval(const char *text);
bool options_parse_hang(const char *text);
bool options_parse_spares(const char *text, uint32_t *spares);
bool options_parse_after(const char *text, uint32_t *job);

/*
 * Checks the options together, after all were given. Returns false, with a message, if an option requires
 * another one or excludes it.
 */
bool options_complete(void);

#endif
