#include "map.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "number.h"
#include "ports.h"

static const char first_line[] = "GEMINI_MAP 1\n";

enum {
	SOCKET_MAX = 107,	/* sun_path without the terminating NUL */
	HOST_MAX = 255,
	HASH_MAX = 128,
	PORT_MIN = 1,
	MASTER_PORT_MIN = 1024,
	PORT_MAX = 65535,
};

static bool is_alnum(char c)
{
	return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool made_of(const char *s, const char *also, size_t max)
{
	const size_t len = strlen(s);

	if (len == 0 || len > max)
		return false;
	for (size_t i = 0; i < len; i++)
		if (!is_alnum(s[i]) && !strchr(also, s[i]))
			return false;
	return true;
}

static bool is_path(const char *s, size_t max)
{
	const size_t len = strlen(s);

	if (len == 0 || len > max || s[0] != '/')
		return false;
	for (size_t i = 0; i < len; i++)
		if (s[i] <= ' ' || s[i] > '~')
			return false;
	return true;
}

static bool parse_port(const char *s, uint32_t min, uint32_t max, uint16_t *out)
{
	uint32_t value;

	if (!number_parse_u32(s, min, max, &value))
		return false;
	*out = (uint16_t)value;
	return true;
}

/* `list` must contain each of 0..nodes-1 exactly once. */
static bool parse_node_ranks(const char *list, uint32_t nodes, uint32_t *ranks)
{
	bool *seen = calloc(nodes, sizeof(*seen));
	bool good = seen != NULL;

	for (uint32_t i = 0; good && i < nodes; i++) {
		const size_t len = strcspn(list, ",");
		uint64_t rank = 0;

		good = number_parse(list, len, 0, nodes - 1, &rank) && !seen[rank] &&
		       list[len] == (i + 1 < nodes ? ',' : '\0');
		if (good) {
			seen[rank] = true;
			ranks[i] = (uint32_t)rank;
			list += len + 1;
		}
	}
	free(seen);
	return good;
}

enum key {
	KEY_JOB, KEY_RESTART, KEY_NODES, KEY_NODELIST, KEY_NODERANKS, KEY_NODERANK,
	KEY_MASTER_ADDR, KEY_MASTER_PORT, KEY_SOCKET, KEY_AGENT_PORT, KEY_EPOCH, KEY_HASH,
	KEY_COUNT,
};

static const char *const key_names[KEY_COUNT] = {
	[KEY_JOB] = "job",
	[KEY_RESTART] = "restart",
	[KEY_NODES] = "nodes",
	[KEY_NODELIST] = "nodelist",
	[KEY_NODERANKS] = "noderanks",
	[KEY_NODERANK] = "noderank",
	[KEY_MASTER_ADDR] = "master_addr",
	[KEY_MASTER_PORT] = "master_port",
	[KEY_SOCKET] = "socket",
	[KEY_AGENT_PORT] = "agent_port",
	[KEY_EPOCH] = "epoch",
	[KEY_HASH] = "hash",
};

/* Splits the lines in place; values[] then point into `text`. */
static bool split(char *text, const char *values[KEY_COUNT])
{
	for (int k = 0; k < KEY_COUNT; k++)
		values[k] = NULL;
	while (*text) {
		char *end = strchr(text, '\n');
		char *equals;

		if (!end)
			return false;
		*end = '\0';
		equals = strchr(text, '=');
		if (!equals || equals == text)
			return false;
		*equals = '\0';
		for (int k = 0; k < KEY_COUNT; k++) {
			if (strcmp(text, key_names[k]) != 0)
				continue;
			if (values[k])
				return false;
			values[k] = equals + 1;
		}
		text = end + 1;
	}
	for (int k = 0; k < KEY_COUNT; k++)
		if (!values[k])
			return false;
	return true;
}

static bool parse_node_rank(const char *text, uint32_t nodes, uint32_t *node_rank)
{
	if (strcmp(text, "spare") == 0) {
		*node_rank = MAP_SPARE;
		return true;
	}
	return number_parse_u32(text, 0, nodes - 1, node_rank);
}

static bool fill(const char *const values[KEY_COUNT], struct map *map)
{
	if (!number_parse_u32(values[KEY_JOB], 1, UINT32_MAX, &map->job) ||
	    !number_parse_u32(values[KEY_RESTART], 0, UINT32_MAX, &map->restart) ||
	    !number_parse_u32(values[KEY_NODES], 1, MAP_NODES_MAX, &map->nodes) ||
	    !parse_node_rank(values[KEY_NODERANK], map->nodes, &map->node_rank) ||
	    !parse_port(values[KEY_MASTER_PORT], MASTER_PORT_MIN, PORT_MAX - PORTS_SPREAD + 1,
			&map->master_port) ||
	    !parse_port(values[KEY_AGENT_PORT], PORT_MIN, PORT_MAX, &map->agent_port) ||
	    !number_parse_string(values[KEY_EPOCH], 0, UINT64_MAX, &map->epoch) ||
	    !made_of(values[KEY_NODELIST], "-_.[],", MAP_SIZE_MAX) ||
	    !made_of(values[KEY_MASTER_ADDR], "-_.:", HOST_MAX) ||
	    !made_of(values[KEY_HASH], "", HASH_MAX) ||
	    strspn(values[KEY_HASH], "0123456789abcdefABCDEF") != strlen(values[KEY_HASH]) ||
	    !is_path(values[KEY_SOCKET], SOCKET_MAX))
		return false;
	map->nodelist = values[KEY_NODELIST];
	map->master_addr = values[KEY_MASTER_ADDR];
	map->socket = values[KEY_SOCKET];
	map->hash = values[KEY_HASH];
	map->node_ranks = calloc(map->nodes, sizeof(*map->node_ranks));
	return map->node_ranks && parse_node_ranks(values[KEY_NODERANKS], map->nodes, map->node_ranks);
}

bool map_parse(const char *bytes, size_t size, struct map *map)
{
	const char *values[KEY_COUNT];

	memset(map, 0, sizeof(*map));
	if (size > MAP_SIZE_MAX || size < sizeof(first_line) - 1 ||
	    memcmp(bytes, first_line, sizeof(first_line) - 1) != 0 || memchr(bytes, '\0', size))
		return false;
	map->text = malloc(size + 1);
	if (!map->text)
		return false;
	memcpy(map->text, bytes, size);
	map->text[size] = '\0';
	if (split(map->text + sizeof(first_line) - 1, values) && fill(values, map))
		return true;
	map_free(map);
	return false;
}

/* Returns the bytes of a file of at most MAP_SIZE_MAX bytes; NULL if it is longer or changes size meanwhile. */
static char *read_all(int fd, size_t expected, size_t *size)
{
	char *bytes = malloc(expected + 1);	/* one more, to detect a file that has grown */
	size_t got = 0;

	while (bytes && got <= expected) {
		const ssize_t n = read(fd, bytes + got, expected + 1 - got);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		got += (size_t)n;
	}
	if (bytes && got == expected) {
		*size = got;
		return bytes;
	}
	free(bytes);
	return NULL;
}

bool map_read(const char *path, uid_t owner, struct map *map)
{
	const int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	struct stat st;
	char *bytes = NULL;
	size_t size = 0;
	bool good;

	if (fd < 0)
		return false;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == owner && st.st_size > 0 &&
	    st.st_size <= MAP_SIZE_MAX)
		bytes = read_all(fd, (size_t)st.st_size, &size);
	(void)close(fd);
	good = bytes && map_parse(bytes, size, map);
	free(bytes);
	return good;
}

void map_free(struct map *map)
{
	free(map->text);
	free(map->node_ranks);
	memset(map, 0, sizeof(*map));
}
