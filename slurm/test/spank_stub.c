#include "test/spank_stub.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum { VARIABLES_MAX = 64, MESSAGES_SIZE = 16384, ENVIRONMENT_SIZE = 16384 };

struct environment {
	char *names[VARIABLES_MAX];
	char *values[VARIABLES_MAX];
};

struct stub_task stub_task;
bool stub_echo;

static enum spank_context current_context;
static struct environment task_env, control_env;
static struct spank_option options[STUB_OPTIONS_MAX];
static unsigned options_count, message_count;
static char messages[MESSAGES_SIZE];

static int find(const struct environment *env, const char *name)
{
	for (int i = 0; i < VARIABLES_MAX; i++)
		if (env->names[i] && strcmp(env->names[i], name) == 0)
			return i;
	return -1;
}

static void env_unset(struct environment *env, const char *name)
{
	const int i = find(env, name);

	if (i < 0)
		return;
	free(env->names[i]);
	free(env->values[i]);
	env->names[i] = env->values[i] = NULL;
}

static void env_set(struct environment *env, const char *name, const char *value)
{
	env_unset(env, name);
	for (int i = 0; i < VARIABLES_MAX; i++)
		if (!env->names[i]) {
			env->names[i] = strdup(name);
			env->values[i] = strdup(value);
			return;
		}
	abort();
}

static const char *env_get(const struct environment *env, const char *name)
{
	const int i = find(env, name);

	return i < 0 ? NULL : env->values[i];
}

static void env_clear(struct environment *env)
{
	for (int i = 0; i < VARIABLES_MAX; i++)
		if (env->names[i])
			env_unset(env, env->names[i]);
}

void stub_reset(enum spank_context context)
{
	current_context = context;
	env_clear(&task_env);
	env_clear(&control_env);
	options_count = message_count = 0;
	messages[0] = '\0';
	memset(&stub_task, 0, sizeof(stub_task));
}

int stub_option(const char *name, const char *text, int remote)
{
	for (unsigned i = 0; i < options_count; i++)
		if (strcmp(options[i].name, name) == 0)
			return options[i].cb(options[i].val, text, remote);
	return -2;
}

unsigned stub_options_registered(void)
{
	return options_count;
}

void stub_setenv(const char *name, const char *value)
{
	env_set(&task_env, name, value);
}

const char *stub_getenv(const char *name)
{
	return env_get(&task_env, name);
}

const char *stub_environment(void)
{
	static char text[ENVIRONMENT_SIZE];
	size_t used = 0;

	text[0] = '\0';
	for (int i = 0; i < VARIABLES_MAX; i++) {
		if (!task_env.names[i])
			continue;
		used += (size_t)snprintf(text + used, sizeof(text) - used, "%s=%s\n", task_env.names[i], task_env.values[i]);
		if (used >= sizeof(text))
			abort();
	}
	return text;
}

const char *stub_control_getenv(const char *name)
{
	return env_get(&control_env, name);
}

const char *stub_messages(void)
{
	return messages;
}

unsigned stub_message_count(void)
{
	return message_count;
}

/* ---- the API itself ---- */

EXPORTED spank_context_t spank_context(void)
{
	return current_context;
}

EXPORTED spank_err_t spank_option_register(spank_t sp, struct spank_option *option)
{
	(void)sp;
	if (options_count == STUB_OPTIONS_MAX)
		return ESPANK_BAD_ARG;
	options[options_count++] = *option;
	return ESPANK_SUCCESS;
}

EXPORTED spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
	spank_err_t err = ESPANK_SUCCESS;
	va_list arguments;
	uint32_t *number;

	(void)sp;
	if (current_context != S_CTX_REMOTE)
		return ESPANK_NOT_REMOTE;
	va_start(arguments, item);
	number = va_arg(arguments, uint32_t *);
	switch (item) {
	case S_JOB_ID:
		*number = stub_task.job;
		break;
	case S_JOB_UID:
		*number = geteuid();
		break;
	case S_JOB_STEPID:
		*number = stub_task.step;
		break;
	case S_JOB_LOCAL_TASK_COUNT:
		*number = stub_task.local_tasks;
		break;
	case S_JOB_TOTAL_TASK_COUNT:
		*number = stub_task.total_tasks;
		break;
	default:
		err = ESPANK_BAD_ARG;
	}
	va_end(arguments);
	return err;
}

EXPORTED spank_err_t spank_getenv(spank_t sp, const char *name, char *buffer, int size)
{
	const char *value = env_get(&task_env, name);

	(void)sp;
	if (size < 0)
		return ESPANK_BAD_ARG;
	if (!value)
		return ESPANK_ENV_NOEXIST;
	return snprintf(buffer, (size_t)size, "%s", value) >= size ? ESPANK_NOSPACE : ESPANK_SUCCESS;
}

EXPORTED spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	if (!overwrite && env_get(&task_env, name))
		return ESPANK_ENV_EXISTS;
	env_set(&task_env, name, value);
	return ESPANK_SUCCESS;
}

EXPORTED spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	(void)sp;
	env_unset(&task_env, name);
	return ESPANK_SUCCESS;
}

EXPORTED spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	if (current_context != S_CTX_LOCAL && current_context != S_CTX_ALLOCATOR)
		return ESPANK_NOT_LOCAL;
	if (!overwrite && env_get(&control_env, name))
		return ESPANK_ENV_EXISTS;
	env_set(&control_env, name, value);
	return ESPANK_SUCCESS;
}

EXPORTED spank_err_t spank_job_control_unsetenv(spank_t sp, const char *name)
{
	(void)sp;
	env_unset(&control_env, name);
	return ESPANK_SUCCESS;
}

static void say(const char *format, va_list arguments)
{
	const size_t used = strlen(messages);
	const int length = vsnprintf(messages + used, MESSAGES_SIZE - used, format, arguments);

	if (length < 0 || used + (size_t)length + 2 > MESSAGES_SIZE)
		abort();
	strcat(messages, "\n");
	message_count++;
	if (stub_echo)
		(void)!write(STDERR_FILENO, messages + used, strlen(messages + used));
}

EXPORTED void slurm_error(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	say(format, arguments);
	va_end(arguments);
}

EXPORTED void slurm_info(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	say(format, arguments);
	va_end(arguments);
}
