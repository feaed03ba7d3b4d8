/* The number of nodes that a command line of sbatch, salloc or srun asks for. */
#ifndef GEMINI_NODES_H
#define GEMINI_NODES_H

#include <stdbool.h>
#include <stdint.h>

/*
 * The most nodes that the command gives to --nodes, or else the #SBATCH lines
 * of its script do. False where that is not said in so many words, or where
 * this reader is not sure which word is an option's value and which the
 * script: nothing may be refused then.
 */
bool nodes_asked(int argc, char *const argv[], uint32_t *most);

/* The same of the process that runs this. */
bool nodes_asked_here(uint32_t *most);

#endif
