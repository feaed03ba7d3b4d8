/* What all messages of the plugin have in common. */
#ifndef GEMINI_MESSAGE_H
#define GEMINI_MESSAGE_H

#define MESSAGE_PREFIX "gemini-hpc: "

enum { MESSAGE_SHOWN_SIZE = 80 };

/*
 * A user's text made fit for one line of a terminal or log: cut short,
 * unprintable bytes shown as '?'. Returns `shown`.
 */
const char *message_shown(const char *text, char shown[MESSAGE_SHOWN_SIZE]);

#endif
