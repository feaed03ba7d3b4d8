# What an administrator types by docs/install.md, in a virtual machine.
cd /srv/packages
dpkg -i gemini-hpc_*.deb gemini-hpc-node_*.deb gemini-hpc-controller_*.deb gemini-hpc-spank-*.deb
gemini-hpc install --dry-run --json >/root/lines.json || [ $? = 1 ]
python3 - <<'P'
import json
import subprocess

for need in json.load(open("/root/lines.json"))["lines"]:
    if need["met"]:
        continue
    if need["line"].startswith("cp "):
        subprocess.run(need["line"].split(), check=True)
    else:
        open(need["file"], "a").write(need["line"] + "\n")
P
mkdir /etc/gemini-hpc
# An emulated processor starts an agent in 10 to 60 s, not in one.
printf 'cluster_name = "mycluster"\ncontroller_host = "n1"\nslurm_user = "slurm"\nattach_timeout_s = 50\n'\
'heartbeat_s = 2\nfence_confirm_s = 10\n' \
  >/etc/gemini-hpc/gemini.toml
[ "$(hostname)" != n1 ] || systemctl restart slurmctld
systemctl enable gemini-hpc-boot
systemctl restart slurmd
[ "$(hostname)" != n1 ] || systemctl enable --now gemini-hpc-controller
for _ in $(seq 60); do [ "$(sinfo -h -n "$(hostname)" -o %T)" = idle ] && exit 0; sleep 1; done
exit 1
