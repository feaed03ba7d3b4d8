#include "options.h"

#include <stdio.h>
#include <string.h>

#include "message.h"
#include "number.h"

enum { OPTION_REPLICAS, OPTION_REDUNDANCY, OPTION_TIER, OPTION_TIER_INTERVAL, OPTION_HANG, OPTION_SPARES, OPTION_AFTER };

static struct options given;

bool options_parse_replicas(const char *text, uint32_t *replicas)
{
	uint64_t value;

	if (!number_parse_string(text, 1, REPLICAS_MAX, &value))
		return false;
	*replicas = (uint32_t)value;
	return true;
}

static bool parse_code(const char *text, uint32_t *group)
{
	const char *plus = strchr(text, '+');
	uint64_t data, parity;

	if (!plus || !number_parse(text, (size_t)(plus - text), 1, REPLICAS_MAX, &data) ||
	    !number_parse_string(plus + 1, 1, PARITY_MAX, &parity) || data + parity > REPLICAS_MAX)
		return false;
	*group = (uint32_t)(data + parity);
	return true;
}

bool options_parse_redundancy(const char *text, uint32_t *group, char value[REDUNDANCY_SIZE])
{
	uint64_t nodes = GROUP_USUAL;

	if (strcmp(text, "replicate") == 0) {
		*group = 0;
		value[0] = '\0';
		return true;
	}
	if (strncmp(text, "rs:", 3) == 0) {
		if (!parse_code(text + 3, group))
			return false;
		(void)snprintf(value, REDUNDANCY_SIZE, "%s", text);
		return true;
	}
	if (strncmp(text, "xor", 3) != 0)
		return false;
	if (text[3] && (text[3] != ':' || !number_parse_string(text + 4, 2, REPLICAS_MAX, &nodes)))
		return false;
	*group = (uint32_t)nodes;
	(void)snprintf(value, REDUNDANCY_SIZE, "%s", "xor");
	return true;
}

bool options_parse_tier(const char *text)
{
	const size_t len = strnlen(text, TIER_MAX + 1);

	if (len == 0 || len > TIER_MAX || text[0] != '/')
		return false;
	for (size_t i = 0; i < len; i++)
		if (text[i] < ' ' || text[i] > '~' || strchr("\"'`\\", text[i]))
			return false;
	return true;
}

bool options_parse_tier_interval(const char *text)
{
	uint64_t seconds;

	return strcmp(text, "auto") == 0 || number_parse_string(text, 1, TIER_INTERVAL_MAX_S, &seconds);
}

bool options_parse_hang(const char *text)
{
	uint64_t seconds;

	return strcmp(text, "off") == 0 || number_parse_string(text, 1, HANG_MAX_S, &seconds);
}

bool options_parse_spares(const char *text, uint32_t *spares)
{
	uint64_t value;

	if (!number_parse_string(text, 0, SPARES_MAX, &value))
		return false;
	*spares = (uint32_t)value;
	return true;
}

bool options_parse_after(const char *text, uint32_t *job)
{
	uint64_t value;

	if (!number_parse_string(text, 1, AFTER_MAX, &value))
		return false;
	*job = (uint32_t)value;
	return true;
}

/* Runs once for each source of an option: the environment, then the command line. */
static int on_option(int which, const char *text, int remote)
{
	char shown[MESSAGE_SHOWN_SIZE];

	/* A step takes its values from the job; they were checked at submission. */
	if (remote)
		return 0;
	if (!text)
		text = "";
	switch (which) {
	case OPTION_REPLICAS:
		if (options_parse_replicas(text, &given.replicas))
			return 0;
		slurm_error(MESSAGE_PREFIX "--gemini-replicas: wanted a whole number from 1 to %d, found '%s'",
			    REPLICAS_MAX, message_shown(text, shown));
		return -1;
	case OPTION_REDUNDANCY:
		if (options_parse_redundancy(text, &given.group, given.redundancy))
			return 0;
		slurm_error(MESSAGE_PREFIX "--gemini-redundancy: wanted replicate, xor:N with N from 2 to %d, or rs:K+M "
			    "with M from 1 to %d and K + M to %d, found '%s'",
			    REPLICAS_MAX, PARITY_MAX, REPLICAS_MAX, message_shown(text, shown));
		return -1;
	case OPTION_TIER:
		if (options_parse_tier(text)) {
			(void)snprintf(given.tier, sizeof(given.tier), "%s", text);
			return 0;
		}
		slurm_error(MESSAGE_PREFIX "--gemini-tier: wanted the absolute path of a directory "
			    "(printable ASCII without quotes or backslashes, at most %d bytes), found '%s'",
			    TIER_MAX, message_shown(text, shown));
		return -1;
	case OPTION_TIER_INTERVAL:
		if (options_parse_tier_interval(text)) {
			(void)snprintf(given.tier_interval, sizeof(given.tier_interval), "%s", text);
			return 0;
		}
		slurm_error(MESSAGE_PREFIX "--gemini-tier-interval: wanted whole seconds from 1 to %d, or auto, "
			    "found '%s'",
			    TIER_INTERVAL_MAX_S, message_shown(text, shown));
		return -1;
	case OPTION_HANG:
		if (options_parse_hang(text)) {
			(void)snprintf(given.hang, sizeof(given.hang), "%s", text);
			return 0;
		}
		slurm_error(MESSAGE_PREFIX "--gemini-hang: wanted whole seconds from 1 to %d, or off, found '%s'",
			    HANG_MAX_S, message_shown(text, shown));
		return -1;
	case OPTION_SPARES:
		if (options_parse_spares(text, &given.spares))
			return 0;
		slurm_error(MESSAGE_PREFIX "--gemini-spares: wanted a whole number from 0 to %d, found '%s'",
			    SPARES_MAX, message_shown(text, shown));
		return -1;
	case OPTION_AFTER:
		if (options_parse_after(text, &given.after))
			return 0;
		slurm_error(MESSAGE_PREFIX "--gemini-after: wanted the number of a job, found '%s' (of an array's task "
			    "the JobId that scontrol shows, without '_')",
			    message_shown(text, shown));
		return -1;
	default:
		return -1;
	}
}

static struct spank_option option_table[] = {
	{ .name = (char[]){ "gemini-replicas" },
	  .arginfo = (char[]){ "N" },
	  .usage = (char[]){ "keep N copies of the training state in the memory of the job's own nodes (1-32)" },
	  .has_arg = 1,
	  .val = OPTION_REPLICAS,
	  .cb = on_option },
	{ .name = (char[]){ "gemini-redundancy" },
	  .arginfo = (char[]){ "HOW" },
	  .usage = (char[]){ "replicate (the default); xor:N: parity over groups of N nodes (2-32), instead of "
			     "copies; rs:K+M: over groups of K+M nodes, any M of which may be lost (1-4)" },
	  .has_arg = 1,
	  .val = OPTION_REDUNDANCY,
	  .cb = on_option },
	{ .name = (char[]){ "gemini-tier" },
	  .arginfo = (char[]){ "DIR" },
	  .usage = (char[]){ "also save to DIR on a shared file system, for failures that memory cannot cover" },
	  .has_arg = 1,
	  .val = OPTION_TIER,
	  .cb = on_option },
	{ .name = (char[]){ "gemini-tier-interval" },
	  .arginfo = (char[]){ "SECONDS" },
	  .usage = (char[]){ "time between two saves to --gemini-tier (1-604800, auto)" },
	  .has_arg = 1,
	  .val = OPTION_TIER_INTERVAL,
	  .cb = on_option },
	{ .name = (char[]){ "gemini-hang" },
	  .arginfo = (char[]){ "SECONDS" },
	  .usage = (char[]){ "start the step again when one rank keeps the others waiting for so long (1-604800, off)" },
	  .has_arg = 1,
	  .val = OPTION_HANG,
	  .cb = on_option },
	{ .name = (char[]){ "gemini-spares" },
	  .arginfo = (char[]){ "N" },
	  .usage = (char[]){ "keep N of the job's nodes idle until another one is lost (0-1024; needs --no-kill)" },
	  .has_arg = 1,
	  .val = OPTION_SPARES,
	  .cb = on_option },
	{ .name = (char[]){ "gemini-after" },
	  .arginfo = (char[]){ "JOBID" },
	  .usage = (char[]){ "go on where this job of yours has ended" },
	  .has_arg = 1,
	  .val = OPTION_AFTER,
	  .cb = on_option },
};

int options_register(spank_t sp)
{
	int rc = 0;

	for (size_t i = 0; i < sizeof(option_table) / sizeof(option_table[0]); i++)
		if (spank_option_register(sp, &option_table[i]) != ESPANK_SUCCESS) {
			slurm_error(MESSAGE_PREFIX "could not register --%s", option_table[i].name);
			rc = -1;
		}
	return rc;
}

bool options_has(const char *name, size_t len)
{
	for (size_t i = 0; i < sizeof(option_table) / sizeof(option_table[0]); i++)
		if (strlen(option_table[i].name) == len && strncmp(option_table[i].name, name, len) == 0)
			return true;
	return false;
}

const struct options *options_get(void)
{
	return &given;
}

bool options_complete(void)
{
	const struct options *options = &given;

	if (given.group && given.replicas) {
		slurm_error(MESSAGE_PREFIX "--gemini-redundancy=%s keeps parity and no copies: leave --gemini-replicas out",
			    given.redundancy);
		return false;
	}
	if (given.group)
		given.replicas = given.group;
	if (options->tier[0] && !options->replicas) {
		slurm_error(MESSAGE_PREFIX "--gemini-tier protects nothing by itself: add --gemini-replicas=N");
		return false;
	}
	if (options->spares && !options->replicas) {
		slurm_error(MESSAGE_PREFIX "--gemini-spares: a spare has nothing to start from without copies: "
			    "add --gemini-replicas=N");
		return false;
	}
	if (options->tier_interval[0] && !options->tier[0]) {
		slurm_error(MESSAGE_PREFIX "--gemini-tier-interval needs a place to save to: add --gemini-tier=DIR");
		return false;
	}
	if (options->hang[0] && !options->replicas) {
		slurm_error(MESSAGE_PREFIX "--gemini-hang needs copies to start again from: add --gemini-replicas=N");
		return false;
	}
	if (options->after && !options->replicas) {
		slurm_error(MESSAGE_PREFIX "--gemini-after: a job that is not protected takes nothing over: "
			    "add --gemini-replicas=N");
		return false;
	}
	return true;
}
