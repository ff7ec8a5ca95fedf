# extra: template and companions
"""Programs beside training that are killed, stopped, slow or full: training goes on, and nothing is lost."""

import os
import signal

from disks import Disk
from drill import Drill, Job, fault
from scripts.companions.owner import Mirror
from storage import LARGE, RUN
from training import assert_same_state, says
from utils.checkpoint import format as checkpoint

# the mirror's program, in whose place another one is started: its uploads wait while a file "hold" is there
PROGRAM = """
import os, sys, time
from scripts.companions import mirror as it
plain = it.Mirror.upload
def put(self, path, name, *rest):
    if '/records/' not in name:
        open({folder!r} + '/uploading', 'a').write(f'{{os.getpid()}}\\n')
        while os.path.exists({folder!r} + '/hold'):
            time.sleep(0.02)
    plain(self, path, name, *rest)
it.Mirror.upload = put
sys.exit(it.main())
"""


class Mirrored:
    """A run with a mirror in a folder, whose uploads are held at first."""

    def __init__(self, drill: Drill) -> None:
        self.drill, self.url = drill, f"file://{drill.folder}/bucket/a"
        self.hold, self._log = drill.folder / "hold", drill.folder / "uploading"
        self.hold.touch()
        (drill.folder / "mirror.py").write_text(PROGRAM.format(folder=str(drill.folder)))
        self.code = (
            f"from utils.extras.companions import programs\nprograms.COMPANIONS_FOLDER = Path({str(drill.folder)!r})\n"
        )
        self.flags = (*RUN, "--mirror", self.url)

    def held(self, **options: object) -> Job:
        """In step 14, while the checkpoint of step 10 is being uploaded."""
        job = self.drill.held(2, 14, *self.flags, code=self.code, **options)
        job.wait_for(self.uploading)
        return job

    def uploading(self) -> int:
        """The process that has begun the latest upload."""
        text = self._log.read_text() if self._log.exists() else ""
        return int(text.splitlines()[-1]) if text.endswith("\n") else 0

    def let_go(self) -> None:
        self.hold.unlink()
        self.drill.let_go()

    def steps(self) -> list[int]:
        return [manifest["step"] for manifest in Mirror(self.url).read_manifests()]

    def has_all(self) -> None:
        """The last checkpoint there is that of the run, which equals the one without a fault."""
        last = Mirror(self.url).read_manifests()[-1]
        copy = Mirror(self.url).fetch_checkpoint(last, self.drill.folder)
        assert last["step"] == 50
        assert_same_state(checkpoint.read_checkpoint(copy)[0], self.drill.runs.last("run"))
        self.drill.is_whole(2, *RUN)

    def resumes(self) -> None:
        self.hold.unlink(missing_ok=True)
        self.drill.fork(2, *self.flags, "--resume_from", "auto")
        self.drill.no_partial_files()
        self.has_all()


@fault("mirror killed", is_default=True, guarantees="companion")
def mirror_killed(drill: Drill) -> None:
    run, killed = Mirrored(drill), []
    job = run.held()
    for _ in range(2):
        pid = job.wait_for(lambda: (pid := run.uploading()) not in killed and pid)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
    job.wait_for(lambda: run.uploading() not in killed)
    run.let_go()
    ended = drill.has_completed(job)
    says(ended.text, r"--mirror \S+ ended with exit code -9\. It is started again in 1 s\.")
    drill.no_partial_files()
    run.has_all()


@fault("rank 0 killed during an upload", False, guarantees="companion")
@fault("torchrun killed during an upload", True, guarantees="companion")
def rank_killed(drill: Drill, is_torchrun: bool) -> None:
    run = Mirrored(drill)
    job = run.held(is_real=is_torchrun)
    job.signal_launcher(signal.SIGKILL) if is_torchrun else job.signal(0, signal.SIGKILL)
    ended = job.end()
    assert ended.code and ended.left == 0, ended.text  # within three seconds
    assert run.steps() == []
    run.resumes()


@fault("mirror stopped", guarantees="companion")
def mirror_stopped(drill: Drill) -> None:
    run = Mirrored(drill)
    job = run.held()
    os.kill(run.uploading(), signal.SIGSTOP)
    run.let_go()
    job.wait_for(job.checkpoint(50).exists)
    assert run.steps() == []
    os.kill(run.uploading(), signal.SIGCONT)
    drill.has_completed(job)
    run.has_all()


@fault("SIGTERM during a slow upload", guarantees="companion")
def stopped_during_an_upload(drill: Drill) -> None:
    """torchrun kills its ranks 30 s after the signal."""
    run = Mirrored(drill)
    job = run.held(is_real=True)
    run.hold.unlink()
    job.wait_for(lambda: run.steps() == [10])
    run.hold.touch()
    job.signal_launcher(signal.SIGTERM)
    drill.let_go(is_slow=True)
    drill.has_stopped(job)
    assert run.steps() == [10]
    run.resumes()


@fault("disk full beside a mirror", guarantees="companion")
def disk_full(drill: Drill) -> None:
    disk, bucket = Disk(drill), drill.folder / "bucket"
    url = f"file://{bucket}/a"
    job = disk.held(2, 14, *RUN, "--mirror", url, code=LARGE, checkpoint_of=10)
    disk.fill(leave=0)
    drill.let_go(is_slow=True)
    job.wait_for_step(25)
    disk.make_room()
    drill.run_on()
    drill.has_completed(job)
    assert [manifest["step"] for manifest in Mirror(url).read_manifests()][-1] == 50
    drill.no_partial_files()
    drill.is_whole(2, *RUN, code=LARGE)


@fault("mirror stopped until another job owns the run", guarantees="companion")
def taken_over(drill: Drill) -> None:
    run = Mirrored(drill)
    run.hold.unlink()
    job = run.held()
    job.wait_for(lambda: run.steps() == [10])
    os.kill(run.uploading(), signal.SIGSTOP)
    drill.fork(2, *run.flags, "--resume_from", "auto", name="other")  # which looks for 30 s whether it is alive
    os.kill(run.uploading(), signal.SIGCONT)
    drill.let_go(is_slow=True)
    drill.fails(job, r"Another job has taken over this run, as --mirror \S+ shows\. End this job\.")
    assert run.steps()[-1] == 50
    assert_same_state(drill.runs.last("other"), drill.runs.last(drill.uninterrupted(2, *RUN)))
