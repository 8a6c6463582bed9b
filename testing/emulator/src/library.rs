//! A compiled library that is loaded into the process, and its one entry.
//!
//! This module must not know languages.

use std::ffi::{CStr, CString, c_char, c_void};
use std::io::Write;
use std::process::Command;

/// An operand of a launch, in the library's layout.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct NativeOperand {
    pub(crate) at: u64,
    pub(crate) device: u64,
    pub(crate) bytes: u64,
    pub(crate) access: u64,
}

/// A launch, in the library's layout.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct NativeLaunch {
    pub(crate) kernel: *const c_char,
    pub(crate) words: *const u8,
    pub(crate) size: usize,
    pub(crate) operands: *const NativeOperand,
    pub(crate) operand_count: usize,
    pub(crate) index: u32,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) reverse: u32,
    pub(crate) watched: u32,
    pub(crate) cluster: [u32; 3],
    pub(crate) cooperative: u32,
    pub(crate) failed_at: usize,
}

/// Runs a launch. Returns null, or a text that lives until the next launch.
type Entry = unsafe extern "C" fn(*mut NativeLaunch) -> *const c_char;
type End = unsafe extern "C" fn();

/// A loaded library. The drop unloads it.
#[derive(Debug)]
pub(crate) struct Library {
    handle: *mut c_void,
    entry: Entry,
    end: End,
    /// The file, for the names of lines.
    file: tempfile::NamedTempFile,
}

// SAFETY: the library belongs to no thread.
unsafe impl Send for Library {}

impl Library {
    /// Loads a library from its bytes.
    ///
    /// # Safety
    /// - The bytes are a library that this crate compiled. Its initialisers may run.
    pub(crate) unsafe fn load(image: &[u8]) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("the emulated kernels are not written: {e}");
        let mut file = tempfile::Builder::new().suffix(".so").tempfile().map_err(failed)?;
        file.write_all(image).and_then(|()| file.flush()).map_err(failed)?;
        let name =
            CString::new(file.path().to_string_lossy().into_owned()).map_err(|e| e.to_string())?;
        // SAFETY: the caller vouches for the library.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: the call before failed, so a message is there.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(format!("the emulated kernels do not load: {}", why.to_string_lossy()));
        }
        // SAFETY: the library is loaded.
        let (entry, end) = unsafe {
            (
                libc::dlsym(handle, c"emulate".as_ptr()),
                libc::dlsym(handle, c"emulated_end".as_ptr()),
            )
        };
        if entry.is_null() || end.is_null() {
            // SAFETY: nothing of the library is used.
            unsafe { libc::dlclose(handle) };
            return Err("the emulated kernels have no entry".to_owned());
        }
        // SAFETY: the symbols are the functions that the runtime defines, with these signatures.
        let (entry, end) = unsafe {
            (
                std::mem::transmute::<*mut c_void, Entry>(entry),
                std::mem::transmute::<*mut c_void, End>(end),
            )
        };
        Ok(Self { handle, entry, end, file })
    }

    /// Runs a launch.
    ///
    /// # Safety
    /// - The pointers of `launch` are to as many bytes and operands, and its kernel is one of the
    ///   library's, which accepts it.
    /// - No other launch of the library runs.
    pub(crate) unsafe fn run(&mut self, launch: &mut NativeLaunch) -> Result<(), String> {
        // SAFETY: by the caller's contract.
        let why = unsafe { (self.entry)(launch) };
        if why.is_null() {
            return Ok(());
        }
        // SAFETY: the library returned a text, which lives until its next launch.
        let why = unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned();
        match self.line_of(launch.failed_at) {
            Some(line) => Err(format!("{line}: {why}")),
            None => Err(why),
        }
    }

    /// File and line of the source's code at an address, if a tool that knows is there.
    fn line_of(&self, at: usize) -> Option<String> {
        if at == 0 {
            return None;
        }
        // SAFETY: all bits of the structure may be zero.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: the call takes any address, and writes to the local.
        if unsafe { libc::dladdr(std::ptr::with_exposed_provenance(at), &raw mut info) } == 0 {
            return None;
        }
        // The address is that of the instruction behind the call.
        let offset = at.checked_sub(info.dli_fbase.addr() + 1)?;
        let told = Command::new("addr2line")
            .args(["-i", "-e"])
            .arg(self.file.path())
            .arg(format!("{offset:#x}"))
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&told.stdout).into_owned();
        // Functions of the language's header are inlined into the source's own.
        text.lines()
            .filter_map(|line| line.split_whitespace().next())
            .find(|line| {
                !line.contains("/cuda.hpp:")
                    && !line.contains("/ptx.hpp:")
                    && !line.starts_with("??")
            })
            .map(|line| line.rsplit_once('/').map_or(line, |(_, file)| file).to_owned())
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: no launch runs, as each borrows the library.
        unsafe {
            (self.end)();
            libc::dlclose(self.handle);
        }
    }
}
