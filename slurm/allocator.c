#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "asked.h"
#include "contexts.h"
#include "job_env.h"
#include "message.h"
#include "number.h"
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
			    options->text[OPTION_REDUNDANCY], replicas, most);
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
		slurm_info(MESSAGE_PREFIX "--gemini-spares needs --no-kill, which was not found; an option unknown to gemini-hpc may "
			   "hide it. Without it Slurm ends the job with its first lost node, and requeues it");
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

/* Names what was accepted and will surprise: the job can lose more than its user may expect. */
static void note_surprises(const struct options *options, bool no_requeue)
{
	const char *const tier = options->text[OPTION_TIER];
	char shown[MESSAGE_SHOWN_SIZE];
	struct stat found;
	uint64_t hang_s;

	if (!options->replicas)
		return;
	if (no_requeue)
		slurm_info(MESSAGE_PREFIX "note: with --no-requeue a lost node ends the job, and its copies serve only new "
			   "steps on healthy nodes: use --requeue");
	if (options->replicas == 1 && !tier[0])
		slurm_info(MESSAGE_PREFIX "note: --gemini-replicas=1 keeps no copy on another node: a killed rank resumes, "
			   "and a lost node takes its state with it: use 2, or add --gemini-tier=DIR");
	if (number_parse_string(options->text[OPTION_HANG], 1, HANG_USUAL_S - 1, &hang_s))
		slurm_info(MESSAGE_PREFIX "note: --gemini-hang=%" PRIu64 ": the step starts again when one rank keeps the others "
			   "waiting for so long, as a slow read of a file can", hang_s);
	if (tier[0] && stat(tier, &found) != 0 && (errno == ENOENT || errno == ENOTDIR))
		slurm_info(MESSAGE_PREFIX "note: --gemini-tier=%s does not exist on this host: nothing is saved if it does not "
			   "exist on the nodes either", message_shown(tier, shown));
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
	note_surprises(options, asked.no_requeue || getenv("SBATCH_NO_REQUEUE"));
	return job_env_publish(sp, options);
}
