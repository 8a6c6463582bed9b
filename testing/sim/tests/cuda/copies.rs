//! Several copies of one operation.

use crate::common::*;
use leasehold_alloc::Buffer;
use leasehold_core::Lease;
use leasehold_hal::{Copies, Copy1d, Device, Op, Stream};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};

/// Bytes of a piece.
const PIECE: u64 = 16;
/// More pieces than the driver is given at once.
const MANY: u64 = 1500;

/// Pieces that reverse their order.
fn pieces(from: &Lease<Buffer>, to: &Lease<Buffer>) -> Vec<Copy1d> {
    (0..MANY)
        .map(|i| Copy1d {
            src: from.addr() + i * PIECE,
            src_native: 0,
            dst: to.addr() + (MANY - 1 - i) * PIECE,
            dst_native: 0,
            bytes: PIECE,
        })
        .collect()
}

/// A device's stream and two buffers, of which the first one has a byte of its own in each piece.
fn filled(device: &Lease<dyn Device>) -> (Lease<dyn Stream>, [Lease<Buffer>; 2]) {
    let s = stream(device);
    let both = [buffer(device, &s, MANY * PIECE), buffer(device, &s, MANY * PIECE)];
    for i in 0..MANY {
        let part = leasehold_hal::Fill {
            dst: both[0].addr() + i * PIECE,
            native: 0,
            bytes: PIECE,
            pattern: i as u8 as u32,
            width: 1,
        };
        submit(&s, &[Op::Fill(part)]).unwrap();
    }
    wait(&s, s.timeline().submitted()).unwrap();
    (s, both)
}

fn reversed() -> Vec<u8> {
    (0..MANY).rev().flat_map(|i| [i as u8; PIECE as usize]).collect()
}

#[test]
fn pieces_are_one_call_of_a_driver_that_has_it_and_single_ones_of_an_older_one() {
    for copy_batch in [true, false] {
        let mut config = driver_config(70);
        config.copy_batch = copy_batch;
        let bench = Bench::with(config, inline());
        let device = bench.open(0);
        let (s, [from, to]) = filled(&device);
        let all = pieces(&from, &to);
        let before = s.timeline().submitted();
        let value = submit(&s, &[Op::Copies(Copies::new(&all).unwrap())]).unwrap();
        assert_eq!(value, before + 1);
        wait(&s, value).unwrap();
        assert!(read(&s, &to) == reversed());
        let calls = ["cuMemcpyBatchAsync", "cuMemcpyDtoDAsync"].map(|api| bench.calls(api));
        assert_eq!(calls, if copy_batch { [2, 0] } else { [0, MANY] });
        // Pieces of no bytes are no part of a call.
        let empty = Copy1d { bytes: 0, ..all[0] };
        let list = [empty, Copy1d { dst: to.addr(), ..all[0] }, empty];
        let value = submit(&s, &[Op::Copies(Copies::new(&list).unwrap())]).unwrap();
        wait(&s, value).unwrap();
        assert_eq!(read(&s, &to)[..PIECE as usize], [0; PIECE as usize]);
        let value = submit(&s, &[Op::Copies(Copies::new(&[empty]).unwrap())]).unwrap();
        wait(&s, value).unwrap();
        let more = ["cuMemcpyBatchAsync", "cuMemcpyDtoDAsync"].map(|api| bench.calls(api));
        assert_eq!(more, if copy_batch { [3, 0] } else { [0, MANY + 1] });
        drop((from, to, s, device));
        bench.close();
    }
}

#[test]
fn pieces_between_devices_without_access_go_one_by_one() {
    for peers in [true, false] {
        let mut config = driver_config(71);
        config.peers = peers;
        let bench = Bench::with(config, inline());
        let (zero, one) = (bench.open(0), bench.open(1));
        zero.peer_access(one.info().id).unwrap();
        one.peer_access(zero.info().id).unwrap();
        let ((a, [from, _]), b) = (filled(&zero), stream(&one));
        let to = buffer(&one, &b, MANY * PIECE);
        let all = pieces(&from, &to);
        let value = submit(&a, &[Op::Copies(Copies::new(&all).unwrap())]).unwrap();
        wait(&a, value).unwrap();
        assert!(read(&b, &to) == reversed());
        let calls = ["cuMemcpyBatchAsync", "cuMemcpyPeerAsync"].map(|api| bench.calls(api));
        assert_eq!(calls, if peers { [2, 0] } else { [0, MANY] });
        drop((from, to, a, b, zero, one));
        bench.close();
    }
}

/// A call that fails may have given some of its pieces to the device. So the submission has a
/// value, which fails, and guards the memory.
#[test]
fn a_failed_call_fails_its_value() {
    for k in 0..2 {
        let bench = Bench::new(72);
        let device = bench.open(0);
        let (s, [from, to]) = filled(&device);
        let all = pieces(&from, &to);
        let rule = FaultRule::on("cuMemcpyBatchAsync", When::At(k), FaultAction::Fail(1));
        bench.driver.machine().set_faults(FaultPlan::none().with(rule));
        let before = s.timeline().submitted();
        let value = submit(&s, &[Op::Copies(Copies::new(&all).unwrap())]).unwrap();
        assert_eq!(value, before + 1);
        let cause = wait(&s, value).unwrap_err();
        assert!(cause.to_string().contains("cuMemcpyBatchAsync"), "{cause}");
        bench.driver.machine().set_faults(FaultPlan::none());
        assert!(submit(&s, &[fill(&from, 1)]).is_err(), "the stream is poisoned");
        // The device's work runs on, so another stream takes other memory.
        let (other, [first, second]) = filled(&device);
        let all = pieces(&first, &second);
        let value = submit(&other, &[Op::Copies(Copies::new(&all).unwrap())]).unwrap();
        wait(&other, value).unwrap();
        assert!(read(&other, &second) == reversed());
        drop((first, second));
        drop((from, to, s, other, device));
        bench.close();
    }
}
