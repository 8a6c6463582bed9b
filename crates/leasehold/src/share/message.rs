//! A shared block on its way over a Unix socket: 128 bytes, and one descriptor beside them.
//!
//! This module must not know devices.

use leasehold_core::{Error, Result};
use std::io::{self, ErrorKind, Read, Write};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// The bytes of a message.
const BYTES: usize = 128;
/// The beginning of each message: a name and the version of the format.
const MAGIC: [u8; 8] = *b"LHSHARE\x01";
/// The offset of the device's text.
const DEVICE: usize = 32;

/// A block of shareable memory: what a process must know of it beside its descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedBlock {
    /// The identity of the device among all of the machine.
    pub(super) device: String,
    /// Bytes of the segment that the descriptor stands for.
    pub(super) segment: u64,
    /// The offset of the block in it.
    pub(super) offset: u64,
    /// Bytes of the block.
    pub(super) bytes: u64,
}

impl SharedBlock {
    /// The description as bytes, for another process of the same machine.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; BYTES] {
        let mut to = [0; BYTES];
        to[..8].copy_from_slice(&MAGIC);
        for (i, word) in [self.segment, self.offset, self.bytes].into_iter().enumerate() {
            to[8 + 8 * i..16 + 8 * i].copy_from_slice(&word.to_le_bytes());
        }
        let device = self.device.as_bytes();
        let bytes = device.len().min(BYTES - DEVICE);
        to[DEVICE..DEVICE + bytes].copy_from_slice(&device[..bytes]);
        to
    }

    /// The description that these bytes are.
    ///
    /// # Errors
    /// `InvalidArgument` for other bytes.
    pub fn from_bytes(from: &[u8]) -> Result<Self> {
        let refused = |why: &str| {
            Error::invalid(format!(
                "{} bytes are no description of a shared block: {why}; send Export::block() of \
                 this version",
                from.len()
            ))
        };
        let from: &[u8; BYTES] = from.try_into().map_err(|_| refused("128 are"))?;
        if from[..8] != MAGIC {
            return Err(refused("they begin with something else"));
        }
        let word = |i: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&from[8 + 8 * i..16 + 8 * i]);
            u64::from_le_bytes(bytes)
        };
        let text = from[DEVICE..].split(|&b| b == 0).next().unwrap_or_default();
        let device = std::str::from_utf8(text).map_err(|_| refused("the device is no text"))?;
        let block =
            Self { device: device.to_owned(), segment: word(0), offset: word(1), bytes: word(2) };
        block.check()?;
        Ok(block)
    }

    /// # Errors
    /// `InvalidArgument` for a block that does not lie in its segment.
    pub(super) fn check(&self) -> Result<()> {
        let inside = self.offset.checked_add(self.bytes).is_some_and(|end| end <= self.segment);
        if inside && self.bytes != 0 && self.segment < 1 << 48 {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "a shared block of {} bytes at {} does not lie in a segment of {} bytes",
            self.bytes, self.offset, self.segment
        )))
    }
}

/// The control data of a message: room for the descriptors that a peer may send by mistake.
type Control = [u64; 32];

fn failed(e: io::Error, doing: &str) -> Error {
    match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Timeout(
            format!("{doing}: the socket's limit is over; wait longer, or look at what the other process does").into(),
        ),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::NotConnected
        | ErrorKind::UnexpectedEof => Error::Unavailable(
            format!("{doing}: the other process has closed its end of the socket ({e})").into(),
        ),
        _ => e.into(),
    }
}

/// Makes a call again that a signal interrupts.
fn retried(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        let n = call();
        if n >= 0 {
            return Ok(n as usize);
        }
        let e = io::Error::last_os_error();
        if e.kind() != ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// A message header over bytes and control data.
fn header(part: &mut libc::iovec, control: &mut Control, bytes: usize) -> libc::msghdr {
    // SAFETY: null pointers and zeros are a valid header without anything.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = bytes as _;
    header
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const FLAGS: (libc::c_int, libc::c_int) = (libc::MSG_NOSIGNAL, libc::MSG_CMSG_CLOEXEC);
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const FLAGS: (libc::c_int, libc::c_int) = (0, 0);

/// Sends a block and its descriptor.
pub(super) fn send(mut socket: &UnixStream, block: &SharedBlock, fd: &OwnedFd) -> Result<()> {
    let mut bytes = block.to_bytes();
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: BYTES };
    let mut control: Control = [0; 32];
    const FD: u32 = size_of::<RawFd>() as u32;
    // SAFETY: arithmetic on a constant.
    let room = unsafe { libc::CMSG_SPACE(FD) } as usize;
    let header = header(&mut part, &mut control, room);
    // SAFETY: the control data is aligned, and has room for one descriptor.
    unsafe {
        let message = libc::CMSG_FIRSTHDR(&raw const header);
        (*message).cmsg_level = libc::SOL_SOCKET;
        (*message).cmsg_type = libc::SCM_RIGHTS;
        (*message).cmsg_len = libc::CMSG_LEN(FD) as _;
        libc::CMSG_DATA(message).cast::<RawFd>().write_unaligned(fd.as_raw_fd());
    }
    let doing = "a shared block was not sent";
    let sent = retried(|| {
        // SAFETY: the header points to locals that live.
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, FLAGS.0) }
    });
    let sent = sent.map_err(|e| failed(e, doing))?;
    socket.write_all(&bytes[sent..]).map_err(|e| failed(e, doing))
}

/// Receives a block and its descriptor. Closes every other one.
pub(super) fn receive(mut socket: &UnixStream) -> Result<(SharedBlock, OwnedFd)> {
    let mut bytes = [0_u8; BYTES];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: BYTES };
    let mut control: Control = [0; 32];
    let mut header = header(&mut part, &mut control, size_of::<Control>());
    let doing = "no shared block was received";
    let got = retried(|| {
        // SAFETY: the header points to locals that live.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, FLAGS.1) }
    });
    let got = got.map_err(|e| failed(e, doing))?;
    let mut descriptors = descriptors(&header);
    if got == 0 {
        return Err(failed(ErrorKind::UnexpectedEof.into(), doing));
    }
    socket.read_exact(&mut bytes[got..]).map_err(|e| failed(e, doing))?;
    let block = SharedBlock::from_bytes(&bytes)?;
    let cut = header.msg_flags & libc::MSG_CTRUNC != 0;
    match (descriptors.pop(), descriptors.is_empty() && !cut) {
        (Some(descriptor), true) => Ok((block, descriptor)),
        (None, _) => Err(Error::invalid(
            "the message of a shared block came without its descriptor; send it by Export::send \
             over a Unix socket (a process that may open no more files loses it too)",
        )),
        _ => Err(Error::invalid(
            "the message of a shared block came with several descriptors; send one block at a time",
        )),
    }
}

/// The descriptors of a message that was received. All are this process's from now on.
fn descriptors(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut found = Vec::new();
    // SAFETY: the system filled the control data in, and says how long it is. Each descriptor in it
    // is new, and nobody else closes it.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while let Some(at) = message.as_ref() {
            if at.cmsg_level == libc::SOL_SOCKET && at.cmsg_type == libc::SCM_RIGHTS {
                let bytes = at.cmsg_len as u64 - u64::from(libc::CMSG_LEN(0));
                let data = libc::CMSG_DATA(message).cast::<RawFd>();
                for i in 0..bytes as usize / size_of::<RawFd>() {
                    let fd = data.add(i).read_unaligned();
                    #[cfg(not(any(target_os = "linux", target_os = "android")))]
                    libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
                    found.push(OwnedFd::from_raw_fd(fd));
                }
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
    found
}
