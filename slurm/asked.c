#include "asked.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "number.h"
#include "options.h"

enum {
	NODES_MOST = 1 << 24,
	WORDS_MAX = 4096,
	BYTES_MAX = 1 << 20,	/* of a command line, and of a script's head */
	LINE_MAX_WORDS = 64,
};

/* Short options of the three commands that take a value; an option in neither string is not known here. */
static const char short_with_value[] = "AaBbCcDdeFGiJLMmNnoPpqrStTwx";
static const char short_flags[] = "EHhIKklOQsuVvXZ";

/* Long options without a value; any other is read only if its value follows `=`. */
static const char *const long_flags[] = {
	"requeue", "no-requeue", "parsable", "hold", "nice", "quiet", "verbose", "overcommit", "oversubscribe", "share",
	"contiguous", "reboot", "spread-job", "use-min-nodes", "exclusive", "no-kill", "test-only", "immediate", "label",
	"pty", "unbuffered", "no-shell", "no-bell", "ignore-pbs",
};

/* The usual long options with a value, which may be the next word. */
static const char *const long_with_value[] = {
	"nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "job-name", "output", "error", "input", "partition", "time",
	"account", "mem", "mem-per-cpu", "gres", "gpus", "gpus-per-node", "gpus-per-task", "nodelist", "exclude", "constraint",
	"qos", "reservation", "chdir", "comment", "dependency", "array", "export", "open-mode", "mail-type", "mail-user",
	"wrap", "begin", "deadline", "signal", "tasks-per-node", "distribution", "licenses", "cpus-per-gpu",
	"gpus-per-socket", "gpu-bind", "gpu-freq", "gres-flags", "mem-per-gpu", "mem-bind", "cpu-freq", "cpu-bind", "mincpus",
	"ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "sockets-per-node", "cores-per-socket", "threads-per-core",
	"extra-node-info", "core-spec", "thread-spec", "hint", "container", "container-id", "clusters", "cluster-constraint",
	"prefer", "switches", "time-min", "tmp", "tres-per-task", "wckey", "priority", "profile", "network", "nodefile", "uid",
	"gid", "export-file", "delay-boot", "kill-on-invalid-dep", "mcs-label", "acctg-freq", "bb", "bbf", "batch", "extra", "mpi",
};

static bool is_one_of(const char *name, size_t len, const char *const *names, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (strlen(names[i]) == len && strncmp(names[i], name, len) == 0)
			return true;
	return false;
}

#define IS_ONE_OF(name, len, names) is_one_of(name, len, names, sizeof(names) / sizeof((names)[0]))

/* Reads "2" or "1-4" (exactly, or at most so many). */
static bool parse_most(const char *text, uint32_t *most)
{
	const char *dash = strchr(text, '-');
	uint64_t least = 0, value;

	if (dash && !number_parse(text, (size_t)(dash - text), 1, NODES_MOST, &least))
		return false;
	if (!number_parse_string(dash ? dash + 1 : text, 1, NODES_MOST, &value) || value < least)
		return false;
	*most = (uint32_t)value;
	return true;
}

struct reading {
	bool sure;	/* each word so far was understood */
	bool said;	/* --nodes was given, and its value understood */
	bool kill_said;	/* --no-kill was given, on or off */
	bool no_kill;
	bool requeue_said;	/* --requeue or --no-requeue was given */
	bool no_requeue;
	bool wrapped;	/* --wrap was given: there is no script */
	uint32_t most;
	int next;	/* the first word that is no option */
};

static void take(struct reading *r, const char *value)
{
	r->said = parse_most(value, &r->most);
	if (!r->said)
		r->sure = false;
}

static void take_no_kill(struct reading *r, const char *value)
{
	r->kill_said = true;
	r->no_kill = !value || strcmp(value, "off") != 0;
}

static void read_long(struct reading *r, const char *word, const char *next)
{
	const char *equals = strchr(word, '=');
	const size_t len = equals ? (size_t)(equals - word) : strlen(word);
	const bool nodes = len == 5 && strncmp(word, "nodes", 5) == 0;

	if (len == 4 && strncmp(word, "wrap", 4) == 0)
		r->wrapped = true;
	if (len == 7 && strncmp(word, "no-kill", 7) == 0)
		take_no_kill(r, equals ? equals + 1 : NULL);
	if (strcmp(word, "requeue") == 0 || strcmp(word, "no-requeue") == 0) {
		r->requeue_said = true;
		r->no_requeue = word[0] == 'n';
	}
	if (equals) {
		if (nodes)
			take(r, equals + 1);
		return;
	}
	if (IS_ONE_OF(word, len, long_flags))
		return;
	if ((!IS_ONE_OF(word, len, long_with_value) && !options_has(word, len)) || !next) {
		r->sure = false;
		return;
	}
	if (nodes)
		take(r, next);
	r->next++;
}

static void read_short(struct reading *r, const char *word, const char *next)
{
	for (; *word; word++) {
		if (*word == 'k') {
			/* Its value can only be joined to it: -k, -koff. */
			const bool off = strcmp(word, "koff") == 0;

			take_no_kill(r, off ? word + 1 : NULL);
			if (off)
				return;
		}
		if (strchr(short_flags, *word))
			continue;
		if (!strchr(short_with_value, *word) || (!word[1] && !next)) {
			r->sure = false;
			return;
		}
		if (*word == 'N')
			take(r, word[1] ? word + 1 : next);
		if (!word[1])
			r->next++;
		return;
	}
}

/* Reads options from words[first] on, up to the first word that is none. */
static struct reading read_options(int count, char *const words[], int first)
{
	struct reading r = { .sure = true, .next = first };

	while (r.sure && r.next < count) {
		const char *word = words[r.next];
		const char *next = r.next + 1 < count ? words[r.next + 1] : NULL;

		if (word[0] != '-' || !word[1])
			break;
		r.next++;
		if (strcmp(word, "--") == 0)
			break;
		if (word[1] == '-')
			read_long(&r, word + 2, next);
		else
			read_short(&r, word + 1, next);
	}
	/* `sbatch -N1 : -N3`: a job of several components. */
	for (int i = first; i < count; i++)
		if (strcmp(words[i], ":") == 0)
			r.sure = false;
	return r;
}

/* Returns the head of a regular file. Never waits, and takes nothing out of a pipe. */
static char *read_head(const char *path)
{
	const int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	char *bytes = NULL;
	struct stat st;

	if (fd < 0)
		return NULL;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
		bytes = malloc(BYTES_MAX + 1);
	if (bytes) {
		ssize_t got = read(fd, bytes, BYTES_MAX);

		bytes[got > 0 ? got : 0] = '\0';
	}
	(void)close(fd);
	return bytes;
}

static struct reading read_line(char *line)
{
	char *words[LINE_MAX_WORDS];
	int count = 0;

	/* Quotes join words, and no option here depends on quoted text. */
	if (strpbrk(line, "\"'\\"))
		return (struct reading){ .sure = false };
	for (char *word = strtok(line, " \t\r"); word; word = strtok(NULL, " \t\r")) {
		if (count == LINE_MAX_WORDS || word[0] == '#')
			break;
		words[count++] = word;
	}
	return read_options(count, words, 0);
}

/* Adds options that count more than those before. */
static void add(struct asked *asked, const struct reading *r)
{
	if (r->said || !r->sure)
		asked->most_nodes = r->sure ? r->most : 0;
	if (r->kill_said)
		asked->no_kill = r->no_kill;
	if (r->requeue_said)
		asked->no_requeue = r->no_requeue;
	asked->sure = asked->sure && r->sure;
}

/* Reads the script's #SBATCH lines, down to its first command; later lines win. */
static struct asked script_asks(char *text)
{
	static const char mark[] = "#SBATCH";
	struct asked asked = { .sure = true };

	for (char *line = text, *end; line && *line; line = end ? end + 1 : NULL) {
		end = strchr(line, '\n');
		if (end)
			*end = '\0';
		if (strncmp(line, mark, sizeof(mark) - 1) == 0) {
			const struct reading r = read_line(line + sizeof(mark) - 1);

			if (strstr(line, "hetjob") || strstr(line, "packjob"))
				return (struct asked){ 0 };
			add(&asked, &r);
		} else if (*line != '#' && strspn(line, " \t\r") != strlen(line)) {
			break;
		}
	}
	return asked;
}

struct asked asked_by(int argc, char *const argv[])
{
	struct asked asked = { .sure = true };
	struct reading r;
	const char *name;
	bool batch;
	char *text;

	if (argc < 1)
		return (struct asked){ 0 };
	name = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
	if (strcmp(name, "sbatch") != 0 && strcmp(name, "salloc") != 0 && strcmp(name, "srun") != 0)
		return (struct asked){ 0 };
	r = read_options(argc, argv, 1);
	batch = strcmp(name, "sbatch") == 0;
	text = batch && r.sure && !r.wrapped && r.next < argc ? read_head(argv[r.next]) : NULL;
	if (text)
		asked = script_asks(text);
	else if (batch && !r.wrapped)
		asked.sure = false;
	free(text);
	add(&asked, &r);
	return asked;
}

struct asked asked_here(void)
{
	const int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	char *bytes = fd < 0 ? NULL : malloc(BYTES_MAX + 1);
	char **words = calloc(WORDS_MAX, sizeof(*words));
	struct asked asked = { 0 };
	ssize_t got = 0, n = 0;
	int count = 0;

	while (bytes && got < BYTES_MAX && (n = read(fd, bytes + got, (size_t)(BYTES_MAX - got))) > 0)
		got += n;
	if (bytes && words && got > 0 && got < BYTES_MAX) {
		bytes[got] = '\0';
		for (char *word = bytes; word < bytes + got && count < WORDS_MAX; word += strlen(word) + 1)
			words[count++] = word;
		if (count < WORDS_MAX)
			asked = asked_by(count, words);
	}
	if (fd >= 0)
		(void)close(fd);
	free(words);
	free(bytes);
	return asked;
}
