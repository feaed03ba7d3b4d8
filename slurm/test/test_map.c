/* The map's parser against hostile bytes. */
#include "map.h"

#include "test/check.h"

#define LINES(nodes, ranks, own)                                                               \
	"GEMINI_MAP 1\njob=1\nrestart=0\nnodes=" nodes "\nnodelist=n[1-3]\nnoderanks=" ranks     \
	"\nnoderank=" own "\nmaster_addr=n1\nmaster_port=23456\nsocket=/run/x\nagent_port=17004\n" \
	"epoch=18446744073709551615\nhash=0f\n"

static bool parses(const char *text)
{
	struct map map;
	const bool good = map_parse(text, strlen(text), &map);

	if (good)
		map_free(&map);
	return good;
}

/* The good map with one line's value replaced. */
static bool parses_with(const char *key, const char *value)
{
	static const char base[] = LINES("3", "0,2,1", "1");
	char text[2048], find[64];
	const char *at, *end;

	(void)snprintf(find, sizeof(find), "\n%s=", key);
	at = strstr(base, find);
	CHECK(at);
	at += strlen(find);
	end = strchr(at, '\n');
	CHECK((size_t)snprintf(text, sizeof(text), "%.*s%s%s", (int)(at - base), base, value, end) < sizeof(text));
	return parses(text);
}

static void test_good(void)
{
	static const char text[] = LINES("3", "0,2,1", "1");
	struct map map;

	CHECK(map_parse(text, sizeof(text) - 1, &map));
	CHECK(map.job == 1 && map.restart == 0 && map.nodes == 3 && map.node_rank == 1);
	CHECK(map.node_ranks[0] == 0 && map.node_ranks[1] == 2 && map.node_ranks[2] == 1);
	CHECK(map.master_port == 23456 && map.agent_port == 17004 && map.epoch == UINT64_MAX);
	CHECK_STRING(map.nodelist, "n[1-3]");
	CHECK_STRING(map.master_addr, "n1");
	CHECK_STRING(map.socket, "/run/x");
	CHECK_STRING(map.hash, "0f");
	map_free(&map);
	CHECK(parses(LINES("1", "0", "0")));
	CHECK(parses_with("nodelist", "gpu-a[001-003],b_2.x"));
	CHECK(parses_with("master_addr", "fd00::1"));
	CHECK(parses_with("master_port", "65520"));
	CHECK(parses_with("noderank", "spare"));
}

static void test_bad_values(void)
{
	static const char *const bad[][2] = {
		{ "job", "0" }, { "job", "" }, { "job", "-1" }, { "job", "1 " }, { "job", "4294967296" },
		{ "job", "01" }, { "restart", "-1" }, { "restart", "x" }, { "nodes", "0" }, { "nodes", "2" },
		{ "nodes", "4" }, { "nodes", "4294967295" }, { "nodes", "65537" }, { "nodes", "99999999999999999999" },
		{ "noderank", "3" }, { "noderank", "-1" }, { "noderanks", "" }, { "noderanks", "0,2" },
		{ "noderanks", "0,2,1," }, { "noderanks", ",0,2,1" }, { "noderanks", "0,2,2" },
		{ "noderanks", "0,2,3" }, { "noderanks", "0;2;1" }, { "noderanks", "0,2,1,3" },
		{ "noderanks", "0, 2,1" }, { "master_port", "0" }, { "master_port", "1023" },
		{ "master_port", "65521" }, { "master_port", "65536" }, { "agent_port", "0" },
		{ "agent_port", "65536" }, { "epoch", "18446744073709551616" }, { "epoch", "" }, { "hash", "" },
		{ "hash", "xyz" }, { "hash", "0f 0f" }, { "master_addr", "" }, { "master_addr", "n1;reboot" },
		{ "master_addr", "n 1" }, { "nodelist", "" }, { "nodelist", "n1 n2" }, { "nodelist", "n$(x)" },
		{ "socket", "" }, { "socket", "relative" }, { "socket", "/a b" }, { "socket", "/a\tb" },
		{ "socket", "/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
			    "aaaaaaaaaaaaaaaaaaaa" },
	};

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		if (parses_with(bad[i][0], bad[i][1])) {
			fprintf(stderr, "accepted: %s=%s\n", bad[i][0], bad[i][1]);
			exit(1);
		}
}

static void test_bad_shape(void)
{
	static const char good[] = LINES("3", "0,2,1", "1");
	char text[sizeof(good) + 64];
	struct map map;

	CHECK(!parses(""));
	CHECK(!parses("GEMINI_MAP 1\n"));
	CHECK(!parses("GEMINI_MAP 2\njob=1\n"));
	CHECK(!parses(good + 1));
	/* Every truncation, also one that only lacks the last end of line. */
	for (size_t size = 0; size < sizeof(good) - 1; size++)
		CHECK(!map_parse(good, size, &map));
	for (size_t i = 0; i < sizeof(good) - 1; i++) {	/* a zero byte anywhere */
		memcpy(text, good, sizeof(good));
		text[i] = '\0';
		CHECK(!map_parse(text, sizeof(good) - 1, &map));
	}
	(void)snprintf(text, sizeof(text), "%sjob=1\n", good);
	CHECK(!parses(text));	/* twice */
	(void)snprintf(text, sizeof(text), "%snonsense\n", good);
	CHECK(!parses(text));
	(void)snprintf(text, sizeof(text), "%s\n", good);
	CHECK(!parses(text));
	(void)snprintf(text, sizeof(text), "%s=x\n", good);
	CHECK(!parses(text));
	(void)snprintf(text, sizeof(text), "%sunknown=\n", good);
	CHECK(parses(text));
	CHECK(!map_parse(good, (size_t)MAP_SIZE_MAX + 1, &map));
}

static void test_large(void)
{
	const uint32_t nodes = 65536;
	char *text = malloc(MAP_SIZE_MAX);
	struct map map;
	int used;

	CHECK(text);
	used = snprintf(text, MAP_SIZE_MAX, "GEMINI_MAP 1\njob=1\nrestart=0\nnodes=%u\nnodelist=n[1-65536]\n"
			"noderank=1\nmaster_addr=n1\nmaster_port=23456\nsocket=/run/x\nagent_port=17004\nepoch=1\n"
			"hash=0f\nnoderanks=", nodes);
	for (uint32_t i = 0; i < nodes; i++)
		used += snprintf(text + used, (size_t)(MAP_SIZE_MAX - used), "%u%c", nodes - 1 - i,
				 i + 1 < nodes ? ',' : '\n');
	CHECK(used < MAP_SIZE_MAX);
	CHECK(map_parse(text, (size_t)used, &map));
	CHECK(map.node_ranks[0] == nodes - 1 && map.node_ranks[nodes - 1] == 0);
	map_free(&map);
	free(text);
}

/* Damaged maps at random (the same ones each time): no crash, and what is accepted keeps the promises. */
static void test_damage(void)
{
	static const char good[] = LINES("3", "0,2,1", "1");
	unsigned state = 12345, accepted = 0;

	for (int round = 0; round < 30000; round++) {
		char *text = malloc(sizeof(good));	/* exact, so that a sanitizer sees any byte beyond */
		size_t size = sizeof(good) - 1;
		struct map map;

		memcpy(text, good, size);
		for (unsigned k = 0; k < 1 + state % 3; k++) {
			static const char likely[] = "0123456789=,\n[]-/x \xff";

			state = state * 1103515245u + 12345u;
			text[(state >> 8) % size] = likely[(state >> 20) % (sizeof(likely) - 1)];
		}
		if (map_parse(text, size, &map)) {
			bool seen[65536] = { false };

			accepted++;
			CHECK(map.nodes >= 1 && map.node_rank < map.nodes && map.master_port <= 65520);
			for (uint32_t i = 0; i < map.nodes; i++) {
				CHECK(map.node_ranks[i] < map.nodes && !seen[map.node_ranks[i]]);
				seen[map.node_ranks[i]] = true;
			}
			map_free(&map);
		}
		free(text);
	}
	CHECK(accepted > 0);
}

int main(void)
{
	test_good();
	test_bad_values();
	test_bad_shape();
	test_large();
	test_damage();
	PASSED();
	return 0;
}
