//! The three members of a MongoDB set, and what befalls their primary.
//!
//! Each member is reached through a proxy, by brokers and by the other members, so that a member can be cut off from
//! some and not from others. A connection belongs to the member whose process has its socket.

use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    clock::FalseClock,
    harness::{MongoServer, MongoSet},
    link::{Link, Mode},
    plan::Fault,
};

/// The number of members. Lanes are those of the members, then those of the brokers, then that of all others.
const MEMBERS: usize = 3;
/// How long the set may take to go on without a member.
const LIMIT: Duration = Duration::from_mins(2);
/// How long a member may take to come back before its data is given up.
const RETURN: Duration = Duration::from_mins(1);
/// By how many milliseconds the clock of a primary that lingers is set back: longer than the fault.
const LINGERING_MS: i64 = 180_000;
/// The pause before members are asked again whether they take part in the set.
const PAUSE: Duration = Duration::from_millis(100);
/// How often the table of connections is read at most, until a connection is found in it.
const TRIES: usize = 5;

/// Processes by number, of members or of brokers.
type Processes = Arc<Mutex<Vec<Option<u32>>>>;

/// A member that is away.
enum Away {
    Frozen(usize),
    Dead(usize),
    CutOff,
}

/// The members of a set.
pub(crate) struct Members {
    set: MongoSet,
    links: Vec<Link>,
    /// The wall clock of each.
    clocks: Vec<FalseClock>,
    processes: Processes,
    brokers: Processes,
    away: Option<Away>,
    /// How often a member did not come back and copied all data anew.
    pub(crate) resynced: usize,
}

/// What to do about members that do not take part in the set.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// All take part.
    Whole,
    /// They may still come back.
    Wait,
    /// This one does not come back by itself: it is killed, and copies all data from the others.
    Resync(usize),
    /// The others cannot make up for what is away.
    GiveUp,
}

/// Decides on members that are away for so long. The one that was told last to copy all data is `resynced`.
fn verdict(take_part: &[bool], away_for: Duration, resynced: Option<usize>) -> Verdict {
    let away: Vec<usize> = (0..take_part.len()).filter(|member| !take_part[*member]).collect();
    match away[..] {
        [] => Verdict::Whole,
        _ if away_for < RETURN => Verdict::Wait,
        [member] if resynced != Some(member) => Verdict::Resync(member),
        _ => Verdict::GiveUp,
    }
}

impl Members {
    /// Starts a set that so many brokers will reach.
    pub(crate) async fn start(brokers: usize) -> Self {
        let (processes, mut links) = (Processes::default(), Vec::new());
        let others = MEMBERS + brokers;
        let brokers: Processes = Arc::new(Mutex::new(vec![None; brokers]));
        let clocks: Vec<_> = (0..MEMBERS).map(|_| FalseClock::new()).collect();
        let set = MongoSet::start_behind(
            |number| clocks[number].variables(),
            async |_, server| {
                processes.lock().push(server.process_id());
                let (members, brokers) = (Arc::clone(&processes), Arc::clone(&brokers));
                let lane_of = move |from, to| {
                    // Members that are still to be started have their lanes too.
                    let mut known = members.lock().clone();
                    known.resize(MEMBERS, None);
                    known.extend(brokers.lock().iter());
                    owner_of(from, to, &known).unwrap_or(others)
                };
                let link = Link::with_lanes(&server.address(), others + 1, lane_of).await;
                links.push(link);
                links.last().expect("a link").address.clone()
            },
        )
        .await;
        Self { set, links, clocks, processes, brokers, away: None, resynced: 0 }
    }

    /// Returns the wall clocks of the members.
    pub(crate) fn clocks(&self) -> &[FalseClock] {
        &self.clocks
    }

    /// Returns where the processes of brokers are to be noted.
    pub(crate) fn brokers(&self) -> Processes {
        Arc::clone(&self.brokers)
    }

    /// Returns the servers.
    pub(crate) fn servers(&self) -> &[MongoServer] {
        self.set.servers()
    }

    /// Returns where brokers reach the set.
    pub(crate) fn uri(&self) -> String {
        self.set.uri()
    }

    /// Lets a fault happen to the primary, waits until the set takes writes again without it, and returns when the fault
    /// began. What is away comes back by [`Members::bring_back`]; also if the set takes none for so long that it is to
    /// be called broken, and not the brokers.
    pub(crate) async fn strike_primary(&mut self, fault: Fault) -> Instant {
        self.bring_back().await;
        let primary = self.set.primary().await;
        let begun = Instant::now();
        self.away = match fault {
            Fault::StepDown => {
                self.set.step_down().await;
                None
            }
            Fault::PrimaryKill => Some(Away::Dead(self.set.kill_primary().await)),
            Fault::PrimaryFreeze => Some(Away::Frozen(self.set.freeze_primary().await)),
            _ => {
                self.cut_off(primary, fault == Fault::PrimaryCutOff);
                Some(Away::CutOff)
            }
        };
        while !self.set.takes_writes().await {
            if begun.elapsed() > LIMIT {
                println!(
                    "({} s after {} the set itself takes no writes) ",
                    LIMIT.as_secs(),
                    fault.name()
                );
                self.bring_back().await;
            }
        }
        begun
    }

    /// Cuts the primary off from the other members and from all brokers but one, and that one from the other members, until these
    /// have taken writes and some more time has passed. A primary that `lingers` takes itself for one all the time: its clock is set
    /// back, so that it does not notice for how long it has heard nothing.
    pub(crate) async fn split(&mut self, broker: usize, lasting: Duration, lingers: bool) {
        self.bring_back().await;
        let primary = self.set.primary().await;
        let begun = Instant::now();
        let lead = self.clocks[primary].lead();
        if lingers {
            self.clocks[primary].set(lead - LINGERING_MS);
        }
        self.cut_off(primary, true);
        self.links[primary].set_lane(MEMBERS + broker, Mode::Open);
        for other in (0..MEMBERS).filter(|other| *other != primary) {
            self.links[other].set_lane(MEMBERS + broker, Mode::Silent);
        }
        self.away = Some(Away::CutOff);
        while !self.set.takes_writes().await && begun.elapsed() < LIMIT {}
        tokio::time::sleep(lasting).await;
        if lingers && !self.set.is_primary(primary).await {
            print!("(the old primary has noticed that it is alone) ");
        }
        self.clocks[primary].set(lead);
        self.bring_back().await;
    }

    /// Cuts a member off from the other members, and from all others too if `entirely`.
    fn cut_off(&self, member: usize, entirely: bool) {
        for other in (0..MEMBERS).filter(|other| *other != member) {
            self.links[member].set_lane(other, Mode::Silent);
            self.links[other].set_lane(member, Mode::Silent);
        }
        if entirely {
            for lane in MEMBERS..self.links[member].lanes() {
                self.links[member].set_lane(lane, Mode::Silent);
            }
        }
    }

    /// Brings back what is away.
    pub(crate) async fn bring_back(&mut self) {
        match self.away.take() {
            Some(Away::Frozen(member)) => self.set.thaw(member),
            Some(Away::Dead(member)) => {
                self.set.restart(member);
                self.know_processes();
            }
            Some(Away::CutOff) => self.links.iter().for_each(|link| link.set(Mode::Open)),
            None => {}
        }
        self.until_whole().await;
    }

    /// Waits until all members take part in the set. One that hangs, as `mongod` does at times in its own rollback,
    /// does not end the campaign: the set goes on without it, and so do brokers.
    async fn until_whole(&mut self) {
        let (mut since, mut resynced) = (Instant::now(), None);
        loop {
            match verdict(&self.set.taking_part().await, since.elapsed(), resynced) {
                Verdict::Whole => return,
                Verdict::Wait => tokio::time::sleep(PAUSE).await,
                Verdict::Resync(member) => {
                    self.resync(member).await;
                    (since, resynced) = (Instant::now(), Some(member));
                }
                // It ends the campaign, with the log of the first member that is away.
                Verdict::GiveUp => self.set.until_whole().await,
            }
        }
    }

    /// Kills a member and has it copy all data from the others.
    async fn resync(&mut self, member: usize) {
        print!(
            "(member {member} did not come back within {} s: it is resynced) ",
            RETURN.as_secs()
        );
        self.set.kill(member);
        // What was answered may be in one of the others alone: a write that both have follows all that was answered.
        let begun = Instant::now();
        while !self.set.takes_writes().await {
            assert!(begun.elapsed() < LIMIT, "two members of three take no writes");
        }
        self.set.restart_empty(member);
        self.know_processes();
        self.resynced += 1;
    }

    fn know_processes(&self) {
        *self.processes.lock() = self.set.process_ids();
    }
}

/// Returns the number of the process that has a connection between these ports.
fn owner_of(from: u16, to: u16, processes: &[Option<u32>]) -> Option<usize> {
    // The table may change while it is read, and then lack a line.
    let inode = (0..TRIES).find_map(|_| {
        let table = fs::read_to_string("/proc/net/tcp").ok()?;
        table.lines().find_map(|line| inode_of(line, from, to)).map(str::to_owned)
    })?;
    let socket = format!("socket:[{inode}]");
    processes.iter().position(|process| process.is_some_and(|process| holds(process, &socket)))
}

/// Returns the inode of a line of `/proc/net/tcp`, if it is about the end of a connection that is between these ports.
fn inode_of(line: &str, from: u16, to: u16) -> Option<&str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let port = |word: usize| u16::from_str_radix(words.get(word)?.split_once(':')?.1, 16).ok();
    (port(1)? == from && port(2)? == to).then(|| words.get(9).copied()).flatten()
}

/// Returns true if a process has this file open.
fn holds(process: u32, file: &str) -> bool {
    let Ok(open) = fs::read_dir(format!("/proc/{process}/fd")) else { return false };
    open.flatten().any(|one| fs::read_link(one.path()).is_ok_and(|to| to.as_os_str() == file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_member_that_does_not_come_back_in_time_is_resynced_once() {
        let soon = Duration::from_secs(1);
        assert_eq!(verdict(&[true, true, true], RETURN, None), Verdict::Whole);
        assert_eq!(verdict(&[true, false, true], soon, None), Verdict::Wait);
        assert_eq!(verdict(&[true, false, true], RETURN, None), Verdict::Resync(1));
        assert_eq!(verdict(&[true, true, false], RETURN, Some(1)), Verdict::Resync(2));
        // Copies of all data take their time too, and then something else is wrong.
        assert_eq!(verdict(&[true, false, true], soon, Some(1)), Verdict::Wait);
        assert_eq!(verdict(&[true, false, true], RETURN, Some(1)), Verdict::GiveUp);
        // What was answered may be in one member that is away and in the one that is not.
        assert_eq!(verdict(&[false, true, false], RETURN, None), Verdict::GiveUp);
    }

    #[test]
    fn the_owner_of_a_connection_is_found_by_its_port() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let stream = std::net::TcpStream::connect(to).unwrap();
        let (from, own) = (stream.local_addr().unwrap().port(), Some(std::process::id()));
        assert_eq!(owner_of(from, to.port(), &[None, own]), Some(1));
        assert_eq!(owner_of(from, to.port(), &[None, None]), None);
        assert_eq!(owner_of(from, 1, &[None, own]), None);
        drop(stream);
    }
}
