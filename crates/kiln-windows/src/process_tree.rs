//! A process and what it starts, which can be ended together.

use std::io;
use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle};
use std::process::Child;
use std::ptr::null;

use windows_sys::Win32::System::JobObjects::{
    AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE,
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JobObjectExtendedLimitInformation, SetInformationJobObject,
    TerminateJobObject,
};

use crate::check;

/// A process and those that it starts from now on. Dropping this ends them all, as does the end of this program.
#[derive(Debug)]
pub struct ProcessTree(OwnedHandle);

impl ProcessTree {
    /// Takes a process that was just started.
    pub fn new(child: &Child) -> io::Result<ProcessTree> {
        // SAFETY: both arguments may be null.
        let job = unsafe { CreateJobObjectW(null(), null()) };
        if job.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: nobody else has this handle.
        let job = unsafe { OwnedHandle::from_raw_handle(job) };
        let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
        limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
        // SAFETY: the handles are open, and the structure is that of the class.
        unsafe {
            let (handle, class) = (job.as_raw_handle(), JobObjectExtendedLimitInformation);
            check(SetInformationJobObject(
                handle,
                class,
                (&raw const limits).cast(),
                size_of_val(&limits) as u32,
            ))?;
            check(AssignProcessToJobObject(handle, child.as_raw_handle()))?;
        }
        Ok(ProcessTree(job))
    }

    /// Ends the process and those that it has started.
    pub fn kill(&self) -> io::Result<()> {
        // SAFETY: the handle is open.
        check(unsafe { TerminateJobObject(self.0.as_raw_handle(), 1) })
    }
}
