//! Files that are not regular, or too long, are refused at once.
#![cfg(unix)]

use leasehold_input::{Cause, open, read};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn cause(path: &Path) -> (Cause, String) {
    let refusal = read(path, 1000).expect_err("a refusal");
    let text = refusal.to_string();
    assert!(text.starts_with(path.to_str().expect("a name")), "{text}");
    (refusal.cause, text)
}

#[test]
fn pipes_devices_folders_and_sockets_are_refused_and_nobody_waits() {
    let dir = tempfile::tempdir().expect("a folder");
    let fifo = dir.path().join("fifo");
    let name = CString::new(fifo.as_os_str().as_bytes()).expect("a name");
    // SAFETY: a string that ends with a zero byte and lives during the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let (why, text) = cause(&fifo);
    assert!(
        why == Cause::NotRegular && text.ends_with(": a pipe; a regular file is expected"),
        "{text}"
    );
    let (why, text) = cause(dir.path());
    assert!(why == Cause::NotRegular && text.contains("a folder"), "{text}");
    let (why, text) = cause(Path::new("/dev/zero"));
    assert!(why == Cause::NotRegular && text.contains("a device"), "{text}");
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    assert_eq!(cause(&socket).0, Cause::Unreadable);
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("/dev/zero", &link).expect("a link");
    assert_eq!(cause(&link).0, Cause::NotRegular);
    assert_eq!(cause(&dir.path().join("nothing")).0, Cause::Missing);
}

#[test]
fn a_file_is_read_up_to_its_limit() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("file");
    std::fs::write(&path, [7; 1000]).expect("written");
    assert_eq!(read(&path, 1000).expect("read"), [7; 1000]);
    std::fs::write(&path, [7; 1001]).expect("written");
    let (why, text) = cause(&path);
    assert!(
        why == Cause::TooLong
            && text.ends_with("the file has 1001 bytes; at most 1000 bytes are read"),
        "{text}"
    );
    // A file without blocks on the disk, and longer than any memory.
    std::fs::File::create(&path).and_then(|f| f.set_len(1 << 42)).expect("a sparse file");
    assert_eq!(cause(&path).0, Cause::TooLong);
    // A file that reports no length, and continues.
    #[cfg(target_os = "linux")]
    assert_eq!(cause(Path::new("/proc/self/smaps")).0, Cause::TooLong);
    assert!(open(&path).is_ok());
}
