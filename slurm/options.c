#include "options.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "message.h"
#include "number.h"

static struct options given;

/* Each takes one value as the user wrote it. Returns the text for the job; NULL if the value is not valid. */
static const char *take_replicas(const char *text)
{
	return number_parse_u32(text, 1, REPLICAS_MAX, &given.replicas) ? text : NULL;
}

static const char *take_code(const char *text)
{
	const char *plus = strchr(text, '+');
	uint64_t data, parity;

	if (!plus || !number_parse(text + 3, (size_t)(plus - text - 3), 1, REPLICAS_MAX, &data) ||
	    !number_parse_string(plus + 1, 1, PARITY_MAX, &parity) || data + parity > REPLICAS_MAX)
		return NULL;
	given.group = (uint32_t)(data + parity);
	return text;
}

static const char *take_redundancy(const char *text)
{
	uint32_t nodes = GROUP_USUAL;

	if (strcmp(text, "replicate") == 0) {
		given.group = 0;
		return "";
	}
	if (strncmp(text, "rs:", 3) == 0)
		return take_code(text);
	if (strncmp(text, "xor", 3) != 0)
		return NULL;
	if (text[3] && (text[3] != ':' || !number_parse_u32(text + 4, 2, REPLICAS_MAX, &nodes)))
		return NULL;
	given.group = nodes;
	return "xor";
}

static const char *take_tier(const char *text)
{
	const size_t len = strnlen(text, TIER_MAX + 1);

	if (len == 0 || len > TIER_MAX || text[0] != '/')
		return NULL;
	for (size_t i = 0; i < len; i++)
		if (text[i] < ' ' || text[i] > '~' || strchr("\"'`\\", text[i]))
			return NULL;
	return text;
}

static const char *take_tier_interval(const char *text)
{
	uint32_t seconds;

	return strcmp(text, "auto") == 0 || number_parse_u32(text, 1, TIER_INTERVAL_MAX_S, &seconds) ? text : NULL;
}

static const char *take_hang(const char *text)
{
	uint32_t seconds;

	return strcmp(text, "off") == 0 || number_parse_u32(text, 1, HANG_MAX_S, &seconds) ? text : NULL;
}

static const char *take_spares(const char *text)
{
	if (!number_parse_u32(text, 0, SPARES_MAX, &given.spares))
		return NULL;
	return given.spares ? text : "";
}

static const char *take_after(const char *text)
{
	uint32_t job;

	return number_parse_u32(text, 1, UINT32_MAX, &job) ? text : NULL;
}

static int on_option(int which, const char *text, int remote);

#define DIGITS(number) #number
#define NUMBER(macro) DIGITS(macro)
#define OPTION(which, option_name, argument, taker, accepted, help)                                                  \
	[which] = { { .name = (char[]){ option_name }, .arginfo = (char[]){ argument }, .usage = (char[]){ help },    \
		      .has_arg = 1, .val = which, .cb = on_option },                                               \
		    taker, accepted }

static struct {
	struct spank_option spank;
	const char *(*take)(const char *text);
	const char *wanted;	/* in the message on a value that is not valid */
} table[OPTION_COUNT] = {
	OPTION(OPTION_REPLICAS, "gemini-replicas", "N", take_replicas,
	       "a whole number from 1 to " NUMBER(REPLICAS_MAX),
	       "keep N copies of the training state in the memory of the job's own nodes (1-32)"),
	OPTION(OPTION_REDUNDANCY, "gemini-redundancy", "HOW", take_redundancy,
	       "replicate, xor:N with N from 2 to " NUMBER(REPLICAS_MAX) ", or rs:K+M with M from 1 to "
	       NUMBER(PARITY_MAX) " and K + M to " NUMBER(REPLICAS_MAX),
	       "replicate (the default); xor:N: parity over groups of N nodes (2-32), instead of "
	       "copies; rs:K+M: over groups of K+M nodes, any M of which may be lost (1-4)"),
	OPTION(OPTION_TIER, "gemini-tier", "DIR", take_tier,
	       "the absolute path of a directory (printable ASCII without quotes or backslashes, at most "
	       NUMBER(TIER_MAX) " bytes)",
	       "also save to DIR on a shared file system, for failures that memory cannot cover"),
	OPTION(OPTION_TIER_INTERVAL, "gemini-tier-interval", "SECONDS", take_tier_interval,
	       "whole seconds from 1 to " NUMBER(TIER_INTERVAL_MAX_S) ", or auto",
	       "time between two saves to --gemini-tier (1-604800, auto)"),
	OPTION(OPTION_HANG, "gemini-hang", "SECONDS", take_hang,
	       "whole seconds from 1 to " NUMBER(HANG_MAX_S) ", or off",
	       "start the step again when one rank keeps the others waiting for so long (1-604800, off)"),
	OPTION(OPTION_SPARES, "gemini-spares", "N", take_spares,
	       "a whole number from 0 to " NUMBER(SPARES_MAX),
	       "keep N of the job's nodes idle until another one is lost (0-1024; needs --no-kill)"),
	OPTION(OPTION_AFTER, "gemini-after", "JOBID", take_after,
	       "the number of a job (of an array's task the JobId that scontrol shows, without '_')",
	       "go on where this job of yours has ended"),
};

/* Runs once for each source of an option: the environment, then the command line. */
static int on_option(int which, const char *text, int remote)
{
	const char *const found = text ? text : "";
	char shown[MESSAGE_SHOWN_SIZE];
	const char *kept;

	/* A step takes its values from the job; they were checked at submission. */
	if (remote)
		return 0;
	kept = table[which].take(found);
	if (!kept) {
		slurm_error(MESSAGE_PREFIX "--%s: wanted %s, found '%s'", table[which].spank.name, table[which].wanted,
			    message_shown(found, shown));
		return -1;
	}
	(void)snprintf(given.text[which], sizeof(given.text[which]), "%s", kept);
	return 0;
}

int options_register(spank_t sp)
{
	int rc = 0;

	for (size_t i = 0; i < OPTION_COUNT; i++)
		if (spank_option_register(sp, &table[i].spank) != ESPANK_SUCCESS) {
			slurm_error(MESSAGE_PREFIX "could not register --%s", table[i].spank.name);
			rc = -1;
		}
	return rc;
}

bool options_has(const char *name, size_t len)
{
	for (size_t i = 0; i < OPTION_COUNT; i++)
		if (strlen(table[i].spank.name) == len && strncmp(table[i].spank.name, name, len) == 0)
			return true;
	return false;
}

const struct options *options_get(void)
{
	return &given;
}

/* Options that do nothing without another one. */
static const struct {
	enum option option, needs;
	const char *why;
} needs[] = {
	{ OPTION_TIER, OPTION_REPLICAS, "--gemini-tier has no effect without copies: add --gemini-replicas=N" },
	{ OPTION_SPARES, OPTION_REPLICAS, "--gemini-spares has no effect without copies: add --gemini-replicas=N" },
	{ OPTION_TIER_INTERVAL, OPTION_TIER, "--gemini-tier-interval needs a place to save to: add --gemini-tier=DIR" },
	{ OPTION_HANG, OPTION_REPLICAS, "--gemini-hang needs copies to start again from: add --gemini-replicas=N" },
	{ OPTION_AFTER, OPTION_REPLICAS, "--gemini-after needs a protected job: add --gemini-replicas=N" },
};

bool options_complete(void)
{
	if (given.group && given.replicas) {
		slurm_error(MESSAGE_PREFIX "--gemini-redundancy=%s keeps parity and no copies: leave --gemini-replicas out",
			    given.text[OPTION_REDUNDANCY]);
		return false;
	}
	if (given.group) {
		given.replicas = given.group;
		(void)snprintf(given.text[OPTION_REPLICAS], sizeof(given.text[OPTION_REPLICAS]), "%" PRIu32, given.group);
	}
	for (size_t i = 0; i < sizeof(needs) / sizeof(needs[0]); i++)
		if (given.text[needs[i].option][0] && !given.text[needs[i].needs][0]) {
			slurm_error(MESSAGE_PREFIX "%s", needs[i].why);
			return false;
		}
	return true;
}
