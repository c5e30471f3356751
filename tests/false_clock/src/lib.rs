//! Takes the place of the C library's functions that tell the time, in a process that loads this library by `LD_PRELOAD`, so
//! that the process has a wall clock of its own, which another process may step while it runs.
//!
//! `FALSE_CLOCK_FILE`, a variable of the environment, names a file of eight bytes: by how many milliseconds the wall clock is
//! ahead of the machine's, as a signed number in the machine's byte order. The file is mapped, so that a step takes effect at once.
//!
//! Only the wall clock is stepped. Clocks that count from the start of the machine are not, as on a machine whose clock is set. A wait
//! that ends at a time of the wall clock takes notice of a step within [`SLICE`]: it returns after so long as if it had been woken for
//! no reason, which waits of the C library may do at any time, and begins anew if its caller finds that there is more to wait for. A caller
//! that takes each return for what it waits for goes on sooner than on a machine whose clock is set back.
//!
//! # Safety
//! The functions have the signatures of the C library. They use neither the heap nor the standard library's files, so that
//! they can be called at any time, and write to no memory but that of their caller's arguments.

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicI64, Ordering},
    },
};

use libc::{
    AT_FDCWD, CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_REALTIME_COARSE, ETIMEDOUT, MAP_FAILED,
    MAP_SHARED, O_CLOEXEC, O_RDONLY, PROT_READ, SYS_clock_gettime, SYS_openat, clockid_t,
    pthread_cond_t, pthread_mutex_t, sem_t, syscall, time_t, timespec, timeval,
};

const NANOS: i64 = 1_000_000_000;
/// Deadlines after so many seconds are those of a wall clock: no machine has been up for thirty years.
const WALL: time_t = NANOS;

/// How long a wait until a time of the wall clock lasts at most, in nanoseconds.
const SLICE: i64 = 200_000_000;

unsafe extern "C" {
    fn pthread_cond_clockwait(
        condition: *mut pthread_cond_t,
        mutex: *mut pthread_mutex_t,
        clock: clockid_t,
        until: *const timespec,
    ) -> c_int;
    fn sem_clockwait(semaphore: *mut sem_t, clock: clockid_t, until: *const timespec) -> c_int;
}

/// Returns by how many nanoseconds the wall clock is ahead of the machine's.
fn lead() -> i64 {
    static LEAD: OnceLock<Option<&'static AtomicI64>> = OnceLock::new();
    LEAD.get_or_init(map).map_or(0, |millis| millis.load(Ordering::Relaxed) * 1_000_000)
}

/// Maps the file, if there is one.
fn map() -> Option<&'static AtomicI64> {
    // SAFETY: nothing changes the environment of these processes.
    let path = unsafe { libc::getenv(c"FALSE_CLOCK_FILE".as_ptr()) };
    if path.is_null() {
        return None;
    }
    // SAFETY: values of the environment end with a zero.
    let file = unsafe { syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) };
    let file = c_int::try_from(file).ok().filter(|file| *file >= 0)?;
    // SAFETY: a new mapping of a file that is long enough.
    let mapped = unsafe {
        libc::mmap(ptr::null_mut(), size_of::<AtomicI64>(), PROT_READ, MAP_SHARED, file, 0)
    };
    // SAFETY: mappings begin at pages, and nothing removes this one.
    (mapped != MAP_FAILED).then(|| unsafe { &*mapped.cast::<AtomicI64>() })
}

fn of_nanos(nanos: i64) -> timespec {
    timespec { tv_sec: nanos.div_euclid(NANOS), tv_nsec: nanos.rem_euclid(NANOS) }
}

fn nanos_of(time: timespec) -> i64 {
    time.tv_sec.saturating_mul(NANOS).saturating_add(time.tv_nsec)
}

/// Reads a clock of the machine.
fn machine(clock: clockid_t) -> i64 {
    let mut now = of_nanos(0);
    // SAFETY: the call writes to this value.
    unsafe { syscall(SYS_clock_gettime, clock, &raw mut now) };
    nanos_of(now)
}

fn wall() -> i64 {
    machine(CLOCK_REALTIME) + lead()
}

/// Returns when a wait ends on the clock that nobody steps, and whether that is before the time that it is to end.
///
/// # Safety
/// The pointer is valid.
unsafe fn deadline(until: *const timespec) -> (timespec, bool) {
    // SAFETY: promised by the caller.
    let until = unsafe { *until };
    if until.tv_sec < WALL {
        return (until, false); // of a condition whose clock is that one already
    }
    let left = nanos_of(until).saturating_sub(wall());
    let end = machine(CLOCK_MONOTONIC).saturating_add(left.min(SLICE)).max(0);
    (of_nanos(end), left > SLICE)
}

/// As in the C library.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    // SAFETY: the arguments are the caller's.
    let result = unsafe { syscall(SYS_clock_gettime, clock, time) } as c_int;
    if result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        // SAFETY: the call has just written there.
        unsafe { *time = of_nanos(nanos_of(*time) + lead()) };
    }
    result
}

/// As in the C library. Time zones, which nobody asks for in this way any more, are not told.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut timeval, _zone: *mut c_void) -> c_int {
    let now = of_nanos(wall());
    if !time.is_null() {
        // SAFETY: the pointer is the caller's.
        unsafe { *time = timeval { tv_sec: now.tv_sec, tv_usec: now.tv_nsec / 1_000 } };
    }
    0
}

/// As in the C library.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(time: *mut time_t) -> time_t {
    let now = of_nanos(wall()).tv_sec;
    if !time.is_null() {
        // SAFETY: the pointer is the caller's.
        unsafe { *time = now };
    }
    now
}

/// As in the C library.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_cond_timedwait(
    condition: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    until: *const timespec,
) -> c_int {
    // SAFETY: the pointers are the caller's.
    unsafe {
        let (end, is_early) = deadline(until);
        match pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, &raw const end) {
            ETIMEDOUT if is_early => 0,
            result => result,
        }
    }
}

/// As in the C library.
///
/// # Safety
/// As in the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sem_timedwait(semaphore: *mut sem_t, until: *const timespec) -> c_int {
    loop {
        // SAFETY: the pointers are the caller's.
        let (result, is_early) = unsafe {
            let (end, is_early) = deadline(until);
            (sem_clockwait(semaphore, CLOCK_MONOTONIC, &raw const end), is_early)
        };
        // SAFETY: the number of the error is this thread's.
        if result == 0 || !is_early || unsafe { *libc::__errno_location() } != ETIMEDOUT {
            return result;
        }
    }
}
