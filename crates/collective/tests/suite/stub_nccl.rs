//! An NCCL without effects. `nccl.rs` compiles it to a `libnccl.so.2` of its own. Each call writes
//! its arguments to the file that `STUB_LOG` names. `STUB_VERSION` is the version; `STUB_CODE` is
//! the code that `ncclAllReduce` returns.
//!
//! The file is a program without dependencies, not a module of the tests.

use std::ffi::{c_char, c_int};
use std::io::Write;

fn number(name: &str) -> Option<c_int> {
    std::env::var(name).ok()?.parse().ok()
}

fn log(line: String) {
    let path = std::env::var("STUB_LOG").unwrap();
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
    // One write: the ranks are threads, and their lines must not mix.
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// # Safety
/// - `version` is a number that can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the number can be written (the contract of this function).
    unsafe { *version = number("STUB_VERSION").unwrap_or(22_809) };
    0
}

/// # Safety
/// - `id` is a place for an id.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut [u8; 128]) -> c_int {
    // SAFETY: the place can be written (the contract of this function).
    unsafe { *id = std::array::from_fn(|i| i as u8) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(_: c_int) -> *const c_char {
    c"invalid usage".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(comm: u64) -> *const c_char {
    if comm == 0 { c"".as_ptr() } else { c"a detail".as_ptr() }
}

#[repr(C)]
struct Id([u8; 128]);

/// # Safety
/// - `comm` is a word that can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRank(comm: *mut u64, size: c_int, id: Id, rank: c_int) -> c_int {
    log(format!("init {size} {rank} {} {}", id.0[0], id.0[127]));
    // SAFETY: the word can be written (the contract of this function).
    unsafe { *comm = 0x77 };
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    src: u64,
    dst: u64,
    count: usize,
    element: c_int,
    op: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    log(format!("all_reduce {src:#x} {dst:#x} {count} {element} {op} {comm:#x} {stream:#x}"));
    number("STUB_CODE").unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    src: u64,
    count: usize,
    element: c_int,
    to: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    log(format!("send {src:#x} {count} {element} {to} {comm:#x} {stream:#x}"));
    0
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    dst: u64,
    count: usize,
    element: c_int,
    from: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    log(format!("recv {dst:#x} {count} {element} {from} {comm:#x} {stream:#x}"));
    0
}

/// Functions of one word or none that succeed.
macro_rules! calls {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            log(stringify!($name).to_owned());
            0
        }
    )*};
}

calls! {
    ncclCommGetAsyncError ncclCommAbort ncclCommDestroy ncclGroupStart ncclGroupEnd ncclBroadcast
    ncclReduce ncclAllGather ncclReduceScatter
}
