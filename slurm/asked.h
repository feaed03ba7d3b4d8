/* What a command line of sbatch, salloc or srun asks Slurm for, as far as gemini-hpc has something to say to it. */
#ifndef GEMINI_ASKED_H
#define GEMINI_ASKED_H

#include <stdbool.h>
#include <stdint.h>

struct asked {
	uint32_t most_nodes;	/* of --nodes; 0 where that is not said in so many words */
	bool no_kill;		/* --no-kill is among the words that were understood */
	bool sure;		/* each word was understood: what was not seen is not there */
};

/*
 * Options of the command, or else the #SBATCH lines of its script. Nothing is
 * said of the nodes where this reader is not sure which word is an option's
 * value and which the script: a job may be refused for it.
 */
struct asked asked_by(int argc, char *const argv[]);

/* The same of the process that runs this. */
struct asked asked_here(void);

#endif
