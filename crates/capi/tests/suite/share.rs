//! Blocks that go to another process: here to another device of this one, by the same way.
#![cfg(target_os = "linux")]

use crate::*;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::null;

fn shareable(name: &CStr) -> Device {
    let options = LeaseholdDeviceOptions {
        size: size_of::<LeaseholdDeviceOptions>(),
        budget: 0,
        policy: 0,
        trace_events: 0,
        flags: LEASEHOLD_DEVICE_SHAREABLE,
    };
    let mut device = 0;
    // SAFETY: the pointers are to locals.
    let opened = unsafe { leasehold_device_open(name.as_ptr(), &options, &mut device) };
    assert_eq!(opened, OK, "{}", last_error());
    Device(device)
}

fn export(device: Device, block: *mut c_void) -> Result<(OwnedFd, [u8; 128]), c_int> {
    let (mut fd, mut description) = (-1, [0; 128]);
    // SAFETY: the pointers are to locals with room.
    match unsafe { leasehold_block_export(device.0, block, &mut fd, description.as_mut_ptr()) } {
        // SAFETY: the descriptor is new, and the caller's.
        OK => Ok((unsafe { OwnedFd::from_raw_fd(fd) }, description)),
        status => Err(status),
    }
}

fn import(device: Device, fd: c_int, description: &[u8; 128]) -> Result<*mut c_void, c_int> {
    let mut block = null_mut();
    // SAFETY: the pointers are to locals, and the test orders all work.
    match unsafe { leasehold_block_import(device.0, fd, description.as_ptr(), &mut block) } {
        OK => Ok(block),
        status => Err(status),
    }
}

#[test]
fn a_block_is_the_same_memory_by_its_descriptor() {
    use std::os::fd::AsRawFd;
    let _turn = turn();
    let (owner, other) = (shareable(c"sim-cuda:0"), shareable(c"sim-cuda:0"));
    let (a, b) = (owner.stream(0), other.stream(0));
    let block = owner.alloc(3 * MIB, a).unwrap();
    owner.fill(a, block, 5, 3 * MIB);
    owner.synchronize();
    let (fd, description) = export(owner, block).unwrap();
    let mapped = import(other, fd.as_raw_fd(), &description).unwrap();
    assert_ne!(mapped, block);
    assert_eq!(other.read(b, mapped, 3 * MIB), vec![5; 3 * MIB]);
    other.fill(b, mapped, 6, 3 * MIB);
    other.synchronize();
    assert_eq!(owner.read(a, block, 3 * MIB), vec![6; 3 * MIB]);
    assert_eq!(leasehold_device_close(other.0), IN_USE, "an import is held");
    // It goes on after the owner's end.
    assert_eq!(owner.free(block), OK);
    owner.synchronize();
    owner.trim();
    assert_eq!(other.read(b, mapped, MIB), vec![6; MIB]);
    other.synchronize();
    assert_eq!(leasehold_block_close(other.0, mapped), OK, "{}", last_error());
    assert_eq!(leasehold_block_close(other.0, mapped), INVALID_ARGUMENT);
    assert_eq!(races(), String::new());
    owner.end(a);
    other.end(b);
    owner.close();
    other.close();
}

#[test]
fn what_cannot_be_shared_is_refused_with_the_cure() {
    use std::os::fd::AsRawFd;
    let _turn = turn();
    let (plain, owner) = (Device::sim(0), shareable(c"sim-cuda:0"));
    let stream = owner.stream(0);
    let block = owner.alloc(MIB, stream).unwrap();
    let own = plain.stream(0);
    let ordinary = plain.alloc(MIB, own).unwrap();
    assert_eq!(export(plain, ordinary).unwrap_err(), UNSUPPORTED);
    assert!(
        last_error().contains("the device with LEASEHOLD_DEVICE_SHAREABLE"),
        "{}",
        last_error()
    );
    assert_eq!(export(owner, ordinary).unwrap_err(), INVALID_ARGUMENT);
    let (fd, description) = export(owner, block).unwrap();
    // SAFETY: the null pointers are refused.
    unsafe {
        let (mut to, mut place) = (null_mut(), -1);
        let (none, from) = (null_mut(), description.as_ptr());
        assert_eq!(leasehold_block_export(owner.0, block, &mut place, none), INVALID_ARGUMENT);
        assert_eq!(
            leasehold_block_import(owner.0, fd.as_raw_fd(), null(), &mut to),
            INVALID_ARGUMENT
        );
        assert_eq!(
            leasehold_block_import(owner.0, fd.as_raw_fd(), from, null_mut()),
            INVALID_ARGUMENT
        );
    }
    for closed in [-1, c_int::MAX] {
        assert_eq!(import(owner, closed, &description).unwrap_err(), INVALID_ARGUMENT);
        assert!(last_error().contains("no descriptor that is open"), "{}", last_error());
    }
    let (pipe, _other) = std::io::pipe().unwrap();
    assert_eq!(import(owner, pipe.as_raw_fd(), &description).unwrap_err(), INVALID_ARGUMENT);
    assert_eq!(import(owner, fd.as_raw_fd(), &[7; 128]).unwrap_err(), INVALID_ARGUMENT);
    let options = LeaseholdDeviceOptions {
        size: size_of::<LeaseholdDeviceOptions>(),
        budget: 0,
        policy: 0,
        trace_events: 0,
        flags: 0x10,
    };
    let mut device = 0;
    // SAFETY: the pointers are to locals.
    let opened = unsafe { leasehold_device_open(c"cpu:0".as_ptr(), &options, &mut device) };
    assert_eq!(opened, INVALID_ARGUMENT);
    assert_eq!((owner.free(block), plain.free(ordinary)), (OK, OK));
    owner.end(stream);
    plain.end(own);
    owner.close();
    plain.close();
}
