/*
 * A SPANK API without Slurm: one imagined process (sbatch, srun or a task)
 * whose options, environment and messages the tests can set and see.
 */
#ifndef SPANK_STUB_H
#define SPANK_STUB_H

#include <stdbool.h>
#include <stdint.h>

#include <slurm/spank.h>

enum { STUB_OPTIONS_MAX = 8 };	/* more are refused */

struct spank_handle {
	int unused;
};

struct stub_task {
	uint32_t job, step, node_id, local_tasks, total_tasks;
};

extern struct stub_task stub_task;
extern bool stub_echo;	/* messages go to stderr, too */

/* Forgets everything and sets what spank_context() says. */
void stub_reset(enum spank_context context);

/* Gives --name=text as Slurm does; the callback's return value, or -2 if the option is not registered. */
int stub_option(const char *name, const char *text, int remote);
unsigned stub_options_registered(void);

/* The environment of the job or task; NULL if unset. */
void stub_setenv(const char *name, const char *value);
const char *stub_getenv(const char *name);

/* All of it, a line each; the next call overwrites it. */
const char *stub_environment(void);

/* What prolog and epilog will see, less the SPANK_ in front. */
const char *stub_control_getenv(const char *name);

/* All messages since the reset, a line each, and their number. */
const char *stub_messages(void);
unsigned stub_message_count(void);

#endif
