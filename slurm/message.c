#include "message.h"

#include <string.h>

const char *message_shown(const char *text, char shown[MESSAGE_SHOWN_SIZE])
{
	static const char more[] = "...";
	const size_t room = MESSAGE_SHOWN_SIZE - sizeof(more);
	size_t i;

	for (i = 0; text[i] && i < room; i++)
		shown[i] = (text[i] < ' ' || text[i] > '~') ? '?' : text[i];
	if (text[i])
		memcpy(shown + i, more, sizeof(more));
	else
		shown[i] = '\0';
	return shown;
}
