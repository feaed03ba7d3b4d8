#include "layout.h"

#include <string.h>

#include "number.h"

enum { TASKS_PER_NODE_MAX = 65535 };

bool layout_parse(const char *text, uint32_t nodes, uint32_t *tasks)
{
	uint32_t filled = 0;

	for (;;) {
		const size_t digits = strspn(text, "0123456789");
		uint64_t count;
		uint64_t repeat = 1;

		if (!number_parse(text, digits, 1, TASKS_PER_NODE_MAX, &count))
			return false;
		text += digits;
		if (strncmp(text, "(x", 2) == 0) {
			const size_t more = strspn(text + 2, "0123456789");

			if (!number_parse(text + 2, more, 1, nodes, &repeat) || text[2 + more] != ')')
				return false;
			text += 2 + more + 1;
		}
		if (repeat > nodes - filled)
			return false;
		while (repeat-- > 0)
			tasks[filled++] = (uint32_t)count;
		if (*text == '\0')
			return filled == nodes;
		if (*text++ != ',')
			return false;
	}
}

uint64_t layout_first_rank(const uint32_t *tasks, const uint32_t *node_ranks, uint32_t nodes,
			   uint32_t node_rank)
{
	uint64_t before = 0;

	for (uint32_t i = 0; i < nodes; i++)
		if (node_ranks[i] < node_rank)
			before += tasks[i];
	return before;
}
