/* The names under which a job's options and its place reach scripts and tasks. */
#ifndef GEMINI_JOB_ENV_H
#define GEMINI_JOB_ENV_H

#include <slurm/spank.h>

#include "options.h"

/*
 * Each option travels under three names. X is for the user's code. SLURM_X is for the plugin; Slurm passes it
 * on even with --export=NONE. Prolog and epilog see the name in the job control environment as SPANK_X.
 */
#define ENV_REPLICAS "GEMINI_REPLICAS"
#define ENV_REDUNDANCY "GEMINI_REDUNDANCY"	/* "xor", over groups of ENV_REPLICAS nodes; or "rs:K+M" */
#define ENV_TIER "GEMINI_TIER"
#define ENV_TIER_INTERVAL "GEMINI_TIER_INTERVAL"
#define ENV_HANG "GEMINI_HANG"
#define ENV_SPARES "GEMINI_SPARES"
#define ENV_AFTER "GEMINI_AFTER"
#define SLURM_ENV(name) "SLURM_" name

/*
 * A random key of this submission, in the job control environment only. It distinguishes the job's directory
 * on the tier from that of another job with the same number.
 */
#define ENV_JOB_KEY "GEMINI_JOB_KEY"

/* srun reads --no-kill from here: in a job with spares, a step goes on when a node is set DOWN. */
#define ENV_NO_KILL "SLURM_NO_KILL"

/* The socket of the node's agent, and this node's place in the job. */
#define ENV_SOCKET "GEMINI_SOCKET"
#define ENV_NODE_RANK "GEMINI_NODE_RANK"
#define ENV_NODES "GEMINI_NODES"
#define ENV_EPOCH "GEMINI_EPOCH"
#define ENV_RESTART "GEMINI_RESTART"

/* The reason why there is no agent, if the prolog has left one. */
#define ENV_UNPROTECTED "GEMINI_UNPROTECTED"

/*
 * "job.restart.step" of the step that RANK and the other variables were exported for. By it, values that a
 * nested srun or sbatch inherits are recognized as ours and not the user's.
 */
#define ENV_RANKS_OF "GEMINI_RANKS_OF"

/* Names of each option, for the user's code and for the plugin. */
extern const char *const job_env_options[OPTION_COUNT][2];

/* Both end with NULL. */
extern const char *const job_env_place[];	/* GEMINI_SOCKET ... GEMINI_RESTART */
extern const char *const job_env_ranks[];	/* RANK, WORLD_SIZE ... MASTER_PORT */

/*
 * Passes the options to the new job's prolog, batch script and tasks. Removes the variables that this process
 * inherited from a protected job in which it runs.
 */
int job_env_publish(spank_t sp, const struct options *options);

#endif
