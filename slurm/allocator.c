#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>

#include "asked.h"
#include "contexts.h"
#include "job_env.h"
#include "message.h"
#include "options.h"

/* If the number of nodes is not known yet, each step checks it before it starts the user's program. */
static bool asks_for_too_few(const struct options *options, uint32_t most)
{
	const uint32_t replicas = options->replicas;

	if (!most || replicas <= most)
		return false;
	if (options->group) {
		slurm_error(MESSAGE_PREFIX "--gemini-redundancy=%s wants %" PRIu32 " nodes for a group, and --nodes asks "
			    "for %" PRIu32 ": ask for more nodes or a smaller group",
			    options->redundancy, replicas, most);
		return true;
	}
	slurm_error(MESSAGE_PREFIX "--gemini-replicas=%" PRIu32 " wants %" PRIu32 " nodes, one per copy, and --nodes asks "
		    "for %" PRIu32 ": ask for more nodes or fewer replicas",
		    replicas, replicas, most);
	return true;
}

/* The nodes that train must be enough for the copies, and more than half: of two halves, both could go on. */
static bool asks_for_too_many_spares(const struct options *options, uint32_t most, bool no_kill, bool sure)
{
	if (!options->spares)
		return false;
	if (!no_kill && !sure) {
		slurm_info(MESSAGE_PREFIX "--gemini-spares needs --no-kill: an option here is not known to gemini-hpc, which "
			   "may hide it. Without --no-kill Slurm ends the job with its first lost node, and requeues it");
	} else if (!no_kill) {
		slurm_error(MESSAGE_PREFIX "--gemini-spares needs --no-kill: without it Slurm ends the job with its first "
			    "lost node");
		return true;
	}
	if (!most || options->replicas + options->spares <= most)
		return false;
	slurm_error(MESSAGE_PREFIX "--gemini-replicas=%" PRIu32 " and --gemini-spares=%" PRIu32 " want %" PRIu32
		    " nodes, and --nodes asks for %" PRIu32,
		    options->replicas, options->spares, options->replicas + options->spares, most);
	return true;
}

/* Returns whether the environment sets --no-kill for sbatch or salloc. */
static bool no_kill_by_environment(void)
{
	return getenv("SBATCH_NO_KILL") || getenv("SALLOC_NO_KILL");
}

int allocator_init_post_opt(spank_t sp)
{
	const struct options *options = options_get();
	const struct asked asked = asked_here();
	const bool no_kill = asked.no_kill || no_kill_by_environment();

	/*
	 * Exit, because Slurm ignores an error of a plugin that plugstack.conf calls optional. It would submit
	 * a job without the requested protection.
	 */
	if (!options_complete() || asks_for_too_few(options, asked.most_nodes) ||
	    asks_for_too_many_spares(options, asked.most_nodes, no_kill, asked.sure))
		exit(EXIT_FAILURE);
	if (options->replicas && !options->spares && no_kill)
		slurm_info(MESSAGE_PREFIX "--no-kill: Slurm does not requeue such a job when it loses a node, so gemini-hpc "
			   "does, and the job comes back with all its nodes");
	return job_env_publish(sp, options);
}
