//! The console: escape sequences, its events, whether it is this program's own.

use std::io;
use std::sync::OnceLock;

use windows_sys::Win32::Foundation::INVALID_HANDLE_VALUE;
use windows_sys::Win32::System::Console::{
    CTRL_BREAK_EVENT, CTRL_C_EVENT, CTRL_CLOSE_EVENT, CTRL_LOGOFF_EVENT, CTRL_SHUTDOWN_EVENT,
    ENABLE_EXTENDED_FLAGS, ENABLE_QUICK_EDIT_MODE, ENABLE_VIRTUAL_TERMINAL_PROCESSING,
    GenerateConsoleCtrlEvent, GetConsoleMode, GetConsoleProcessList, GetStdHandle, STD_ERROR_HANDLE,
    STD_HANDLE, STD_INPUT_HANDLE, STD_OUTPUT_HANDLE, SetConsoleCtrlHandler, SetConsoleMode,
};

use crate::check;

/// What a console asks its programs to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Ctrl-C or Ctrl-Break.
    Interrupt,
    /// The window is closed, the user logs off, the system shuts down. Windows ends the process within seconds.
    Close,
}

type Handler = Box<dyn Fn(Event) + Send + Sync>;

static HANDLER: OnceLock<Handler> = OnceLock::new();

/// Calls `handler` at every event, on a thread of Windows. Only the first call counts.
///
/// At [`Event::Close`] the process goes on after the handler, for the seconds that Windows gives it.
pub fn on_event(handler: impl Fn(Event) + Send + Sync + 'static) -> io::Result<()> {
    if HANDLER.set(Box::new(handler)).is_err() {
        return Ok(());
    }
    // SAFETY: the function has the signature that Windows expects and lives as long as the program.
    check(unsafe { SetConsoleCtrlHandler(Some(handle), 1) })
}

unsafe extern "system" fn handle(event: u32) -> i32 {
    let event = match event {
        CTRL_C_EVENT | CTRL_BREAK_EVENT => Event::Interrupt,
        CTRL_CLOSE_EVENT | CTRL_LOGOFF_EVENT | CTRL_SHUTDOWN_EVENT => Event::Close,
        _ => return 0,
    };
    let Some(handler) = HANDLER.get() else { return 0 };
    handler(event);
    // Windows ends the process when this returns.
    while event == Event::Close {
        std::thread::park();
    }
    1
}

/// Lets the console act upon escape sequences, on standard output and standard error. False if one of them is a console
/// that can't, as before Windows 10: it would print them.
pub fn enable_escapes() -> bool {
    [STD_OUTPUT_HANDLE, STD_ERROR_HANDLE].into_iter().all(enable_escapes_of)
}

fn enable_escapes_of(stream: STD_HANDLE) -> bool {
    // SAFETY: these take any handle, and write to a variable that outlives the call.
    unsafe {
        let handle = GetStdHandle(stream);
        let mut mode = 0;
        let is_console =
            !handle.is_null() && handle != INVALID_HANDLE_VALUE && GetConsoleMode(handle, &raw mut mode) != 0;
        !is_console
            || mode & ENABLE_VIRTUAL_TERMINAL_PROCESSING != 0
            || SetConsoleMode(handle, mode | ENABLE_VIRTUAL_TERMINAL_PROCESSING) != 0
    }
}

/// Whether the console was opened for this program alone, as a double click does: its window closes with the program.
pub fn is_own() -> bool {
    let mut processes = [0; 2];
    // SAFETY: the length is that of the array.
    unsafe { GetConsoleProcessList(processes.as_mut_ptr(), processes.len() as u32) == 1 }
}

/// Lets a click into the window select nothing: while text is selected, everything that the program prints waits, and so does
/// the program.
pub fn ignore_clicks() -> io::Result<()> {
    // SAFETY: these take any handle, and write to a variable that outlives the call.
    unsafe {
        let handle = GetStdHandle(STD_INPUT_HANDLE);
        let mut mode = 0;
        check(GetConsoleMode(handle, &raw mut mode))?;
        check(SetConsoleMode(handle, mode & !ENABLE_QUICK_EDIT_MODE | ENABLE_EXTENDED_FLAGS))
    }
}

/// Sends Ctrl-Break to a process that was started as the first of a process group, and to its children.
pub fn send_break(process: u32) -> io::Result<()> {
    // SAFETY: takes two numbers.
    check(unsafe { GenerateConsoleCtrlEvent(CTRL_BREAK_EVENT, process) })
}
