//! The loops of the figures make legal calls and leave no objects behind. Their times have no
//! meaning here.

use leasehold_cuda::driver::ops::{ContextOps, CopyKind, DeviceOps};
use leasehold_sim::MachineConfig;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::traces::figures::{LARGEST, RawLoop};
use leasehold_sim::traces::kernels;

#[test]
fn the_loops_are_legal_and_leave_nothing() {
    let machine = MachineConfig::seed(1).devices(1, 1 << 30);
    kernels::register(&machine.kernels);
    let driver = SimDriver::new(SimDriverConfig::new(machine)).unwrap();
    driver.init().unwrap();
    {
        let raw = RawLoop::new(&driver, 0).unwrap();
        let small = [
            raw.launch(1),
            raw.round_trip(1),
            raw.context_switch(1),
            raw.graph(50, 1),
            raw.event_record(1),
            raw.write_word(1),
            raw.pinned_copy(CopyKind::HostToDevice, 4096, 1),
            raw.pinned_copy(CopyKind::DeviceToHost, 4096, 1),
            raw.pageable_copy(CopyKind::HostToDevice, 4096, 1),
            raw.pageable_copy(CopyKind::DeviceToHost, 4096, 1),
            raw.pageable_copy_waited(CopyKind::HostToDevice, 4096, 1),
            raw.pageable_copy_waited(CopyKind::DeviceToHost, 4096, 1),
            raw.alloc_pair(4096, 1),
            raw.alloc_async_pair(4096, 1),
        ];
        for figure in small {
            assert!(figure.unwrap().total > 0.0);
        }
        let mut calls = 0;
        let figures = raw.rounds(
            20,
            3,
            (
                &mut || {
                    calls += 1;
                    Ok(())
                },
                &mut || Ok(()),
            ),
        );
        assert_eq!((figures.unwrap().map(|f| f.samples), calls), ([3, 3], 4), "in turns");
        assert!(raw.pinned_copy(CopyKind::HostToDevice, LARGEST + 1, 1).is_err());
    }
    assert!(driver.current().unwrap().is_null());
    assert!(driver.census().is_nothing() && driver.take_leaks().is_empty());
    assert!(driver.machine().memory_in_use().is_nothing());
    assert!(driver.machine().take_reports().is_empty());
}
