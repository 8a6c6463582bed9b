//! Tests of the costs of kernels.

use super::*;

#[test]
fn costs_settle_and_rise_slowly() {
    let a = Advice::new();
    let key = 0x55d0_1234_5670;
    assert_eq!(a.cost(key), 0);
    a.note_cost(key, 10_000, 10);
    assert_eq!(a.cost(key), 1000);
    a.note_cost(key, 50_000_000, 10);
    assert!(a.cost(key) <= 2000, "one stolen processor is not believed");
    for _ in 0..50 {
        a.note_cost(key, 300, 10);
    }
    assert!((1..=40).contains(&a.cost(key)), "{}", a.cost(key));
    a.note_cost(key, 5, 0);
    a.note_cost(key, u64::MAX, 1);
}

#[test]
fn a_large_job_wakes_and_a_small_one_does_not() {
    assert_eq!(Advice::new().wakes(20_000), 0);
    assert_eq!(Advice::new().wakes(65_000), 2);
    assert_eq!(Advice::new().wakes(0), u32::MAX, "what is unknown may be large");
    assert!(!Advice::shares(100) && Advice::shares(0) && Advice::shares(10_000));
}

#[test]
fn a_run_of_small_jobs_wakes_and_is_expected_again() {
    let a = Advice::new();
    assert_eq!(a.wakes(20_000), 0);
    assert_ne!(a.wakes(20_000), 0);
    a.end_period();
    assert_ne!(a.wakes(20_000), 0);
    a.end_period();
    assert_eq!(a.wakes(20_000), 0, "the last period was short");
    a.end_period();
    assert_eq!(a.wakes(20_000), 0, "small jobs with pauses between them");
}

#[test]
fn the_time_of_a_wake_is_learnt_within_bounds() {
    let a = Advice::new();
    for _ in 0..50 {
        a.note_ring(1000);
        a.note_arrival(1000 + 50_000_000);
        a.note_arrival(77);
    }
    assert_eq!(a.wakes(150_000), 0);
    a.end_period();
    assert_ne!(a.wakes(250_000), 0, "a large job always wakes");
    a.end_period();
    for _ in 0..50 {
        a.note_ring(1000);
        a.note_arrival(1001);
    }
    assert!(a.wakes(5_000) >= 1);
}
