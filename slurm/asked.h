/* The options of an sbatch, salloc or srun command line that matter to gemini-hpc. */
#ifndef GEMINI_ASKED_H
#define GEMINI_ASKED_H

#include <stdbool.h>
#include <stdint.h>

struct asked {
	uint32_t most_nodes;	/* of --nodes; 0 if the number is not given literally */
	bool no_kill;		/* --no-kill is among the understood words */
	bool no_requeue;	/* --no-requeue is, and no later --requeue */
	bool sure;		/* each word was understood: an option not seen is not given */
};

/*
 * Reads the options of the command, or else the #SBATCH lines of its script. Reports no number of nodes if it
 * is not sure which word is an option's value and which the script: a job may be refused because of the
 * number.
 */
struct asked asked_by(int argc, char *const argv[]);

/* Reads the command line of the calling process. */
struct asked asked_here(void);

#endif
