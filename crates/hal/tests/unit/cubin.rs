//! Tests of the choice of a cubin.

use super::*;

#[test]
fn a_device_gets_the_last_image_that_it_runs() {
    // SAFETY: no driver gets the image.
    let of = |capability| unsafe { Cubin::new(capability, Cow::Borrowed(&[])) };
    let images = [of((8, 6)), of((8, 0)), of((9, 0))];
    let select = |device| Cubin::select(&images, device).map(Cubin::compute_capability);
    for (device, want) in [
        ((8, 0), Some((8, 0))),
        ((8, 5), Some((8, 0))),
        ((8, 9), Some((8, 6))),
        ((9, 0), Some((9, 0))),
        ((7, 5), None),
        ((10, 0), None),
    ] {
        assert_eq!(select(device), want, "{device:?}");
    }
    assert_eq!(format!("{:?}", of((9, 0)).into_owned()), "Cubin(sm_90, 0 bytes)");
}
