/* The options that users give to sbatch, salloc and srun. */
#ifndef GEMINI_OPTIONS_H
#define GEMINI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <slurm/spank.h>

enum option {
	OPTION_REPLICAS, OPTION_REDUNDANCY, OPTION_TIER, OPTION_TIER_INTERVAL, OPTION_HANG, OPTION_SPARES, OPTION_AFTER,
	OPTION_COUNT,
};

/* Macros, so that messages can contain them. */
#define REPLICAS_MAX 32			/* copies of every shard, the own node's included; nodes of a parity group */
#define PARITY_MAX 4			/* nodes of a group that may be lost */
#define TIER_MAX 4096			/* bytes of a path */
#define TIER_INTERVAL_MAX_S 604800	/* a week */
#define HANG_MAX_S 604800
#define SPARES_MAX 1024

enum {
	GROUP_USUAL = 4,
	HANG_USUAL_S = 60,	/* less is noted: reads of files and evaluations on one rank take as long */
};

/* The requested values; 0 and "" mean: not given. All values are valid. */
struct options {
	uint32_t replicas;	/* with parity: the nodes of a group */
	uint32_t group;		/* 0: whole copies */
	uint32_t spares;
	char text[OPTION_COUNT][TIER_MAX + 1];	/* as the job gets it; of a parity group "xor", or "rs:K+M" */
};

/* Registers the options; must run in slurm_spank_init of every context. */
int options_register(spank_t sp);

/* Returns whether `name`, without its dashes, is one of the options. Each option takes a value. */
bool options_has(const char *name, size_t len);

/* Returns the options given so far. */
const struct options *options_get(void);

/*
 * Checks the options together, after all were given. Returns false, with a message, if an option requires
 * another one or excludes it.
 */
bool options_complete(void);

#endif
