/* Slurm's tasks-per-node lists and the ranks that follow from them. */
#include "layout.h"

#include "test/check.h"

static void test_good(void)
{
	static const uint32_t ranks[] = { 0, 2, 1 };
	uint32_t tasks[8];

	CHECK(layout_parse("2(x3),1", 4, tasks));
	CHECK(tasks[0] == 2 && tasks[1] == 2 && tasks[2] == 2 && tasks[3] == 1);
	CHECK(layout_parse("7", 1, tasks) && tasks[0] == 7);
	CHECK(layout_parse("1,3(x2),2", 4, tasks));
	CHECK(tasks[0] == 1 && tasks[1] == 3 && tasks[2] == 3 && tasks[3] == 2);
	CHECK(layout_parse("2(x2),1", 3, tasks));
	CHECK(layout_first_rank(tasks, ranks, 3, 0) == 0);
	CHECK(layout_first_rank(tasks, ranks, 3, 1) == 2);
	CHECK(layout_first_rank(tasks, ranks, 3, 2) == 3);
	CHECK(layout_first_rank(tasks, ranks, 3, 3) == 5);
}

static void test_bad(void)
{
	static const char *const bad[] = {
		"", ",", "2", "2(x2)", "2(x4)", "2(x3),", ",2(x3)", "2(x3),1", "2(x)", "2(x0),2(x3)", "2(3)", "2(x3",
		"2x3", "0(x3)", "-1(x3)", "65536(x3)", "2(x4294967299)", "2(x18446744073709551619)", "2 (x3)", "2,2,2 ",
		"2;2;2", "2(x3)junk", "99999999999999999999(x3)",
	};
	uint32_t tasks[3];

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		if (layout_parse(bad[i], 3, tasks)) {
			fprintf(stderr, "accepted for 3 nodes: '%s'\n", bad[i]);
			exit(1);
		}
}

static void test_first_host(void)
{
	static const char *const good[][2] = {
		{ "n1", "n1" },
		{ "n[1-3]", "n1" },
		{ "n[3,1-2]", "n3" },
		{ "gpu[001-004,9]x[2-3],login", "gpu001x2" },
		{ "n7.a-b_c,n[1-3]", "n7.a-b_c" },
		{ "[10-12]", "10" },
		{ "r[1]n[007]", "r1n007" },
	};
	static const char *const bad[] = {
		"", ",", ",n1", "n[", "n[]", "n[-2]", "n[1", "n[1-", "n[1-2", "n[a-b]", "n[1;2]", "n 1", "n1;id", "$HOME",
		"n[[1]]", "n]", "n\n", "/etc/passwd", "abcdefgh", "abcdefg[1-2]",
	};
	char host[8];
	char room[64];

	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
		CHECK(layout_first_host(good[i][0], room, sizeof(room)));
		CHECK_STRING(room, good[i][1]);
	}
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		if (layout_first_host(bad[i], host, sizeof(host))) {
			fprintf(stderr, "accepted as a host list: '%s'\n", bad[i]);
			exit(1);
		}
	CHECK(layout_first_host("abcdefg", host, sizeof(host)));
}

int main(void)
{
	test_good();
	test_bad();
	test_first_host();
	PASSED();
	return 0;
}
