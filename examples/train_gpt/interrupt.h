#pragma once

namespace train_gpt {

/// From now on Ctrl-C, SIGTERM and SIGUSR1 ask the run to end instead of ending the process. Asking again, two
/// seconds later or more, ends the process: the launcher passes on a Ctrl-C that the terminal has already sent, so the
/// same request may come twice.
void catch_interrupts();
bool interrupted();

} // namespace train_gpt
