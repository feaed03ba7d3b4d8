#include "layout.h"

#include <string.h>

#include "number.h"

enum { TASKS_PER_NODE_MAX = 65535 };

static const char digits[] = "0123456789";
static const char of_a_name[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.";

bool layout_parse(const char *text, uint32_t nodes, uint32_t *tasks)
{
	uint32_t filled = 0;

	for (;;) {
		const size_t length = strspn(text, digits);
		uint64_t count;
		uint64_t repeat = 1;

		if (!number_parse(text, length, 1, TASKS_PER_NODE_MAX, &count))
			return false;
		text += length;
		if (strncmp(text, "(x", 2) == 0) {
			const size_t more = strspn(text + 2, digits);

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

bool layout_first_host(const char *list, char *host, size_t size)
{
	size_t used = 0;

	while (*list && *list != ',') {
		const bool bracket = *list == '[';
		const char *const made_of = bracket ? digits : of_a_name;
		const size_t length = strspn(list += bracket, made_of);

		if (length == 0 || length >= size - used)
			return false;
		memcpy(host + used, list, length);
		used += length;
		list += length;
		if (bracket) {
			if (!*list || !strchr("-,]", *list) || !(list = strchr(list, ']')))
				return false;
			list++;
		}
	}
	host[used] = '\0';
	return used > 0;
}
