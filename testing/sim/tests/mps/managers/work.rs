//! Work over the managers' resources, as a stream will submit it.

use super::bench::*;
use leasehold_core::Index;
use leasehold_mps::driver::ops::*;
use leasehold_mps::manager::event::EventKind;

#[test]
fn two_encoders_and_two_queues_work_over_leased_resources() {
    let bench = Bench::with(leasehold_mps::MpsConfig::default().queues(2));
    let device = bench.open();
    let library = device.libraries().acquire(SOURCE, &options()).unwrap();
    let pipeline = device.libraries().pipeline(&library, "bump", &plain()).unwrap();
    let heap = device.heaps().acquire(&HEAP).unwrap();
    let buffer = device.buffers().place(&heap, 64, Some(512)).unwrap();
    let fence = device.fences().acquire().unwrap();
    let event = device.events().acquire(EventKind::Device).unwrap();
    let queues = [0, 1].map(|i| device.command_queues().acquire(Index::new(i)).unwrap());
    let reached = event.next_value();
    let driver = &bench.driver;
    // SAFETY: every handle is of a lease that is held until the work is over. Each encoder has
    // ended before its command buffer is committed, and each object is released once. The fence and
    // the event order the accesses.
    unsafe {
        let claims = [queues[0].claim().unwrap(), queues[1].claim().unwrap()];
        let mut all = Vec::new();
        for (i, queue) in queues.iter().enumerate() {
            let command =
                driver.command_buffer(queue.native(), CommandBufferDesc::default()).unwrap();
            if i == 1 {
                driver.encode_wait(command, event.native(), reached).unwrap();
            }
            for turn in 0..2 {
                let encoder = driver.compute_encoder(command, &ComputeDesc::default()).unwrap();
                if turn == 1 {
                    driver.wait_fence(encoder.into(), fence.native()).unwrap();
                }
                driver.set_pipeline(encoder, pipeline.native()).unwrap();
                driver.set_buffer(encoder, buffer.native(), 0, 0).unwrap();
                let one = Dispatch { groups: [1; 3], threads: [1; 3], bindings: &[] };
                driver.dispatch(encoder, &one).unwrap();
                driver.update_fence(encoder.into(), fence.native()).unwrap();
                driver.end_encoding(encoder.into()).unwrap();
                driver.release(encoder.into());
            }
            if i == 0 {
                driver.encode_signal(command, event.native(), reached).unwrap();
            }
            driver.commit(command).unwrap();
            all.push(command);
        }
        drop(claims);
        for command in all {
            driver.wait_completed(command).unwrap();
            assert_eq!(driver.completion(command).unwrap().error, None);
            driver.release(command.into());
        }
        let at = std::ptr::with_exposed_provenance::<u32>(buffer.contents().unwrap() as usize);
        assert_eq!(at.read(), 4);
    }
    assert_eq!(driver.machine().take_reports(), []);
    drop((library, pipeline, heap, buffer, fence, event, queues, device));
    bench.close();
}
